"""What logprobs need of a row of logits, in one pass: peak, normaliser, likeliest tokens, a rank.

A row is cut into splits, one program each, so that one row keeps many processors busy, too. Every
split is read once, in any float dtype, and summarised; a second op merges a row's summaries.
Nothing of the size of the logits is made.

Tokens are in one total order: larger logits first, the lower id first among equal ones. NaN counts
as the smallest, and -0 equals 0. A token and its place in the order are one int64, so that the
largest word is the likeliest token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import INTERPRETED, TwinOp
from mrv2.sampling.order import to_ordered

GROUPS = 512
WIDTH = 4
CHUNK = GROUPS * WIDTH
"""Tokens that a program of `summarize_logits` takes at a time: groups of neighbours. The fastest of
256 to 1024 groups of 4 to 16 with 2 to 8 warps, for 5 of the likeliest in 256 rows of 151,936 on an
H200, 2026-11-29: `gather_logprobs` takes 63 us of bfloat16 and 111 us of float32."""
MAX_CHUNKS = 128
"""Chunks that a split can have, one after the other."""
_ENOUGH_PROGRAMS = 1056
"""Programs that keep an H200 busy; with more, the likeliest are sought in too many places."""
_SPLITS = (8, 128)
"""Splits that `merge_summaries` is compiled for; each other number would be compiled anew."""
MAX_TOP = 32
"""Likeliest tokens that a program finds one by one. For more of them, sorting is faster."""
_NUM_WARPS = 4
_LEAST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32."""
_NAN_KEY = tl.constexpr(-0x7FFFFFFF)
"""Below the key of every other logit."""
_NOBODY = tl.constexpr(-0x8000000000000000)
"""The word where there is no further token."""
_ID = tl.constexpr(0x7FFFFFFF)
"""The low bits of a word hold the token's id, each bit turned over: a lower id, a larger word."""
_CHUNK_ELEMENTS = 1 << 18
"""Elements in a temporary of a reference, which takes rows in chunks of about this size."""


def split_size(logits: Tensor) -> int:
    """Return how many tokens of a row are summarised together on the device of the logits.

    The reference takes a row as a whole: its log-sum is then that of `torch.log_softmax`.
    """
    num_logits, vocab_size = logits.shape
    if not (INTERPRETED or logits.is_cuda):
        return vocab_size
    num_chunks = cdiv(vocab_size, CHUNK)
    num_splits = min(num_chunks, cdiv(_ENOUGH_PROGRAMS, max(num_logits, 1)))
    size: int = CHUNK * min(cdiv(num_chunks, num_splits), MAX_CHUNKS)
    return size


@triton.jit
def _key(logit: tl.tensor) -> tl.tensor:
    # An int32 in the order of the floats: -0 equals 0, and NaN is the smallest.
    return tl.where(logit != logit, _NAN_KEY, to_ordered(logit))


@triton.jit
def _word(key: tl.tensor, token_ids: tl.tensor, mask: tl.tensor) -> tl.tensor:
    word = (key.to(tl.int64) << 32) | (token_ids ^ _ID).to(tl.int64)
    return tl.where(mask, word, _NOBODY)


def _words(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 words in the order of the tokens; of float32 logits and int64 ids, any shape."""
    bits = torch.where(logits == 0.0, 0.0, logits).view(torch.int32)
    key = torch.where(logits.isnan(), _NAN_KEY.value, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    words: Tensor = (key.long() << 32) | (token_ids ^ _ID.value)
    return words


@triton.jit
def _summarize_kernel(  # noqa: PLR0913, PLR0915 - pointers one by one; one pass finds all
    edges_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    words_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_top: tl.tensor,
    num_chunks: tl.tensor,
    vocab_size: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * num_chunks * (GROUPS * WIDTH)
    cell = logit_idx * tl.num_programs(1) + tl.program_id(1)
    logits_ptr += logit_idx * logits_stride
    token = tl.load(logits_ptr + tl.load(token_ids_ptr + logit_idx)).to(tl.float32)
    group = tl.arange(0, GROUPS)
    within = tl.arange(0, WIDTH)[None, :]
    # A lane is a place in every chunk; it remembers its largest logit, and where it was first.
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    best_chunk = tl.full((GROUPS,), -1, tl.int32)
    peak = tl.full((GROUPS,), _LEAST, tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    count = tl.zeros((GROUPS, WIDTH), tl.int32)
    below = tl.full((GROUPS, WIDTH), float("-inf"), tl.float32)
    for chunk in range(num_chunks):
        ids = begin + chunk * (GROUPS * WIDTH) + group[:, None] * WIDTH + within
        mask = ids < vocab_size
        logit = tl.load(logits_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
        count += (mask & (logit >= token)).to(tl.int32)
        below = tl.maximum(below, tl.where(logit < token, logit, float("-inf")))
        largest = tl.max(logit, axis=1)
        # The first one that is no NaN is better than none, even if it is -inf.
        first = (
            (best_chunk < 0)
            & (largest == largest)
            & (begin + chunk * (GROUPS * WIDTH) + group * WIDTH < vocab_size)
        )
        best_chunk = tl.where(first | (largest > best), chunk, best_chunk)
        best = tl.maximum(best, largest)
        higher = tl.maximum(peak, largest)
        total *= tl.exp(peak - higher)
        total += tl.sum(tl.exp(logit - higher[:, None]), axis=1)
        peak = higher
    highest = tl.max(peak, axis=0)
    total = tl.sum(total * tl.exp(peak - highest), axis=0)
    tl.store(edges_ptr + cell * 2, highest)
    tl.store(edges_ptr + cell * 2 + 1, tl.max(tl.max(below, axis=1), axis=0))
    tl.store(log_sums_ptr + cell, tl.log(total))
    words_ptr += cell * (1 + num_top)
    tl.store(words_ptr, tl.sum(tl.sum(count, axis=1), axis=0).to(tl.int64))
    if num_top > 0:
        # Each lane stands for its best token; the winner's lane is read again for its next one.
        ids = (
            begin
            + tl.maximum(best_chunk, 0)[:, None] * (GROUPS * WIDTH)
            + group[:, None] * WIDTH
            + within
        )
        mask = ids < vocab_size
        logit = tl.load(logits_ptr + ids, mask=mask, other=0.0).to(tl.float32)
        lane = tl.max(_word(_key(logit), ids, mask), axis=1)
        chunk_of = tl.arange(0, MAX_CHUNKS)[:, None]
        for place in range(num_top):
            winner = tl.max(lane, axis=0)
            tl.store(words_ptr + 1 + place, winner)
            won = ((((winner & _ID) ^ _ID).to(tl.int32) - begin) // WIDTH) % GROUPS
            rivals = begin + chunk_of * (GROUPS * WIDTH) + won * WIDTH + within
            inside = (chunk_of < num_chunks) & (rivals < vocab_size)
            value = tl.load(logits_ptr + rivals, mask=inside, other=0.0).to(tl.float32)
            others = _word(_key(value), rivals, inside)
            following = tl.max(tl.max(tl.where(others < winner, others, _NOBODY), axis=1), axis=0)
            lane = tl.where(group == won, following, lane)


def _summarize_launch(
    edges: Tensor,
    log_sums: Tensor,
    words: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    split_size: int,
) -> Launch:
    parts = (edges, log_sums, words)
    sizes = (words.shape[2] - 1, split_size // CHUNK, logits.shape[1])
    return Launch(
        _summarize_kernel,
        tuple(log_sums.shape),
        (*parts, logits, logits.stride(0), token_ids, *sizes),
        {"GROUPS": GROUPS, "WIDTH": WIDTH, "MAX_CHUNKS": MAX_CHUNKS},
        num_warps=_NUM_WARPS,
    )


def _summarize_reference(
    edges: Tensor,
    log_sums: Tensor,
    words: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    split_size: int,
) -> None:
    """Summarise each split of each row: all that `merge_summaries` needs.

    Args:
        edges: [num_logits, num_splits, 2] float32, contiguous. The largest logit, NaN left out, at
            least the lowest finite float32; and the largest one below the given token's, or -inf.
        log_sums: [num_logits, num_splits] float32, contiguous. Log of the sum of
            exp(logit - largest): -inf where there is nothing but -inf, NaN where there is NaN or
            +inf.
        words: [num_logits, num_splits, 1 + num_top] int64, contiguous. How many logits are at least
            as large as the given token's, then the likeliest tokens in order, as words; int64's
            lowest where there are no more.
        logits: [num_logits, vocab_size], any float dtype; taken as float32. Rows may be strided.
        token_ids: [num_logits] int32 or int64. One token of each row.
        split_size: Tokens in a split; for the kernel a multiple of `CHUNK`, at most `MAX_CHUNKS`.
    """
    ids = token_ids.long().unsqueeze(1)
    for rows in row_chunks(logits):
        whole = logits[rows].float()
        token = whole.gather(1, ids[rows])
        for split, part in enumerate(whole.split(split_size, dim=1)):
            largest = part.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(dim=1)
            # The largest logprob is (peak - peak) - log_sum, exactly.
            log_sum = -torch.log_softmax(part, dim=1).amax(dim=1)
            nothing = (part == -torch.inf).all(dim=1)
            edges[rows, split, 0] = largest.clamp(min=_LEAST.value)
            edges[rows, split, 1] = part.masked_fill(~(part < token), -torch.inf).amax(dim=1)
            log_sums[rows, split] = torch.where(nothing, -torch.inf, log_sum)
            words[rows, split, 0] = (part >= token).sum(dim=1)
            if words.shape[2] > 1:
                words[rows, split, 1:] = _top_words(part, split * split_size, words.shape[2] - 1)


def _top_words(logits: Tensor, first_id: int, num_top: int) -> Tensor:
    """Return the words of the likeliest tokens in order, [num_logits, num_top].

    Args:
        logits: [num_logits, num_tokens] float32.
        first_id: Id of the first token.
        num_top: How many.
    """
    num_logits, num_tokens = logits.shape
    found = min(num_top, num_tokens)
    least = torch.topk(logits.nan_to_num(-torch.inf, torch.inf, -torch.inf), found, dim=1)
    # What ties with the last one is a candidate, too: only the words tell who comes first.
    rows, columns = (~(logits < least.values[:, -1:])).nonzero(as_tuple=True)
    words = _words(logits[rows, columns], columns + first_id)
    order = words.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    ends = torch.bincount(rows, minlength=num_logits).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    result = torch.full((num_logits, num_top), _NOBODY.value)
    result[:, :found] = words[order[starts.unsqueeze(1) + torch.arange(found)]]
    return result


summarize_logits = TwinOp(
    "sampling.summarize_logits",
    reference=_summarize_reference,
    launch=_summarize_launch,
    mutates=frozenset({"edges", "log_sums", "words"}),
)


@triton.jit
def _merge_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    token_ids_ptr: tl.tensor,
    edges_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    given_ids_ptr: tl.tensor,
    split_edges_ptr: tl.tensor,
    split_log_sums_ptr: tl.tensor,
    split_words_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_splits: tl.tensor,
    num_top: tl.tensor,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    mask = split < num_splits
    cells = logit_idx * num_splits + split
    peaks = tl.load(split_edges_ptr + cells * 2, mask=mask, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    log_sums = tl.load(split_log_sums_ptr + cells, mask=mask, other=float("-inf"))
    log_sum = tl.log(tl.sum(tl.where(mask, tl.exp(log_sums + (peaks - peak)), 0.0), axis=0))
    log_sum = tl.where(log_sum == float("-inf"), float("nan"), log_sum)
    belows = tl.load(split_edges_ptr + cells * 2 + 1, mask=mask, other=float("-inf"))
    tl.store(edges_ptr + logit_idx * 2, tl.where(log_sum != log_sum, log_sum, peak))
    tl.store(edges_ptr + logit_idx * 2 + 1, tl.max(belows, axis=0))
    tl.store(log_sum_ptr + logit_idx, log_sum)
    width = 1 + num_top
    counts = tl.load(split_words_ptr + cells * width, mask=mask, other=0)
    tl.store(count_ptr + logit_idx, tl.sum(counts, axis=0).to(tl.int32))
    token_ids_ptr += logit_idx * num_columns
    tl.store(token_ids_ptr, tl.load(given_ids_ptr + logit_idx).to(tl.int32))
    # A place of a split in each cell.
    place = tl.arange(0, SPLITS * MOST)
    mask = (place // MOST < num_splits) & (place % MOST < num_top)
    cells = (logit_idx * num_splits + place // MOST) * width + 1 + place % MOST
    word = tl.load(split_words_ptr + cells, mask=mask, other=_NOBODY)
    for column in range(1, width):
        winner = tl.max(word, axis=0)
        tl.store(token_ids_ptr + column, ((winner & _ID) ^ _ID).to(tl.int32))
        word = tl.where(word == winner, _NOBODY, word)
    for start in range(width, num_columns, SPLITS * MOST):
        tl.store(token_ids_ptr + start + place, 0, mask=start + place < num_columns)


def _merge_launch(
    token_ids: Tensor,
    edges: Tensor,
    log_sum: Tensor,
    count: Tensor,
    given_ids: Tensor,
    split_edges: Tensor,
    split_log_sums: Tensor,
    split_words: Tensor,
) -> Launch:
    num_logits, num_splits, width = split_words.shape
    parts = (split_edges, split_log_sums, split_words)
    sizes = (token_ids.shape[1], num_splits, width - 1)
    args = (token_ids, edges, log_sum, count, given_ids, *parts, *sizes)
    fitting = [splits for splits in _SPLITS if num_splits <= splits]
    splits = fitting[0] if fitting else triton.next_power_of_2(num_splits)
    constexprs = {"SPLITS": splits, "MOST": MAX_TOP}
    return Launch(_merge_kernel, (num_logits,), args, constexprs)


def _merge_reference(
    token_ids: Tensor,
    edges: Tensor,
    log_sum: Tensor,
    count: Tensor,
    given_ids: Tensor,
    split_edges: Tensor,
    split_log_sums: Tensor,
    split_words: Tensor,
) -> None:
    """Merge the summaries of each row: `logprob = (logit - peak) - log_sum`.

    A row without a softmax has NaN for both: one that holds NaN or +inf, or nothing but -inf.

    Args:
        token_ids: [num_logits, num_columns] int32, contiguous. The given token, then the likeliest
            ones in order, then 0.
        edges: [num_logits, 2] float32, contiguous. The peak, which is the largest logit; and the
            largest one below the given token's, or -inf.
        log_sum: [num_logits] float32. Log of the sum of exp(logit - peak).
        count: [num_logits] int32. Logits at least as large as the given token's.
        given_ids: [num_logits] int32 or int64. The given tokens.
        split_edges: [num_logits, num_splits, 2] float32, of `summarize_logits`, as those below.
        split_log_sums: [num_logits, num_splits] float32.
        split_words: [num_logits, num_splits, 1 + num_top] int64. All splits of a row together hold
            at least `num_top` tokens; that is less than `num_columns` and at most `MAX_TOP`.
    """
    num_top = split_words.shape[2] - 1
    peaks = split_edges[:, :, 0]
    largest = peaks.amax(dim=1)
    if peaks.shape[1] == 1:  # as it is: the log of an exponential would round
        total = split_log_sums[:, 0].clone()
    else:
        total = (split_log_sums + (peaks - largest.unsqueeze(1))).exp().sum(dim=1).log()
    total.masked_fill_(total == -torch.inf, torch.nan)
    log_sum.copy_(total)
    edges[:, 0] = torch.where(total.isnan(), total, largest)
    edges[:, 1] = split_edges[:, :, 1].amax(dim=1)
    count.copy_(split_words[:, :, 0].sum(dim=1))
    token_ids[:, 0] = given_ids
    words = split_words[:, :, 1:].flatten(1).sort(dim=1, descending=True).values[:, :num_top]
    token_ids[:, 1 : 1 + num_top] = (words & _ID.value) ^ _ID.value
    token_ids[:, 1 + num_top :] = 0


merge_summaries = TwinOp(
    "sampling.merge_summaries",
    reference=_merge_reference,
    launch=_merge_launch,
    mutates=frozenset({"token_ids", "edges", "log_sum", "count"}),
)


def row_chunks(logits: Tensor) -> list[slice]:
    """Return the rows in chunks that bound a reference's temporaries."""
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
