"""HashLM: a model whose logits depend on every KV slot that a token may attend to.

It stands in for a network in tests of the runner alone. The KV cache of a group holds one word a
slot: a hash of the token and of its position. A token's context is the weighted sum of the words of
all positions up to its own, read through the block table, and its logits are a permutation that the
context picks. So a wrong block, a stale slot, a wrong position, a sequence length one short or a
token that was not committed changes the logits, and with them the next token. Two logits of a row
are never closer than `SPACING`.

`hashlm_tokens` says in plain Python, without a cache, which tokens must come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.config import RunnerConfig
from mrv2.ports import AttentionPlanner, ForwardInputs, ForwardOutput

SPACING = 0.125
"""Between neighbouring logits of a row; a power of two, so that every logit is exact."""

_WORD = 2**64
_TOKEN_KEY = 0x9E3779B97F4A7C15
_POSITION_KEY = 0xC2B2AE3D27D4EB4F
_GROUP_KEY = 0xD6E8FEB86659FD93
_LOGIT_KEY = 0xA0761D6478BD642F
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shift and multiplier of each round of `mix`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashAttention:
    """What HashLM needs of a batch to write and to read its cache."""

    batch_idx: Tensor
    """[num_tokens] int64. Token -> request of the batch."""
    ends: Tensor
    """[num_tokens] int64. Positions that the token attends to: 0 up to here, this one left out."""
    max_seq_len: int
    block_tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]


class HashLM(AttentionPlanner):
    """The model and its attention planner, on any device, without a wait.

    Args:
        config: Gives vocabulary, KV groups and device.
        num_blocks: Blocks in the cache of each group.
        windows: For each KV group the positions that a token sees, its own counted in; None sees
            all, and so does every group by default.
    """

    def __init__(
        self, config: RunnerConfig, num_blocks: int, windows: Sequence[int | None] | None = None
    ) -> None:
        device = config.device
        self.vocab_size = config.vocab_size
        self._block_sizes = tuple(group.block_size for group in config.kv_groups)
        self._windows = tuple(windows or (None,) * len(config.kv_groups))
        generator = torch.Generator().manual_seed(1)
        self.caches = tuple(
            torch.randint(-(2**62), 2**62, (num_blocks * size + 1,), generator=generator).to(device)
            for size in self._block_sizes
        )
        """One word a slot for each group, and a last one that takes what has no slot. What was
        never written is noise, not zeros."""
        self._weights = 2 * torch.arange(config.max_model_len, device=device) + 1
        token_ids = torch.arange(config.vocab_size, device=device)
        self._logit_keys = _mix(token_ids + _signed(_LOGIT_KEY))
        self._levels = SPACING * torch.arange(config.vocab_size, device=device)

    def plan(self, batch: InputBatch) -> HashAttention:
        """Locate each token in its request by the device's lengths, as attention kernels do."""
        layout = batch.layout
        ends = batch.query_start_loc[1:]
        token_idx = torch.arange(layout.num_tokens, dtype=ends.dtype, device=ends.device)
        # What pads the step lies behind every request, and is taken for the last one's.
        batch_idx = torch.bucketize(token_idx, ends, right=True).clamp_(max=len(ends) - 1)
        behind = ends[batch_idx] - token_idx
        return HashAttention(
            batch_idx=batch_idx,
            ends=(batch.seq_lens[batch_idx] - behind + 1).clamp(0, layout.max_seq_len),
            max_seq_len=layout.max_seq_len,
            block_tables=batch.block_tables,
            slots=batch.slots,
        )

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Write the words of the step's tokens, then return each one's context, [num_tokens, 1].

        Behind those stands noise for what pads the inputs.
        """
        return ForwardOutput(hidden=self.layers(inputs, range(len(self.caches))))

    def layers(
        self, inputs: ForwardInputs, groups: Sequence[int], earlier: Tensor | None = None
    ) -> Tensor:
        """Do for some KV groups what `forward` does for all.

        Args:
            inputs: The step's.
            groups: Which, in their order.
            earlier: [num_tokens, 1] int64. What the groups before them made; None at first.
        """
        attention = inputs.attention
        if attention is None:
            return torch.zeros_like(inputs.positions).unsqueeze(1)
        assert isinstance(attention, HashAttention)
        padded = _mix(inputs.input_ids.long() * _signed(_TOKEN_KEY) + inputs.positions)
        words = padded[: len(attention.ends)]
        hidden = torch.zeros_like(words) if earlier is None else earlier[: len(words), 0]
        for group in groups:
            slots, cache = attention.slots[group], self.caches[group]
            cache.index_copy_(0, torch.where(slots < 0, len(cache) - 1, slots), words)
            context = self._context(group, attention)
            hidden = _mix((hidden + context) * _signed(_GROUP_KEY))
        return torch.cat([hidden, padded[len(hidden) :]]).unsqueeze(1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [num_logits, vocab_size] float32: evenly spaced levels, in the context's order."""
        order = _mix(hidden + self._logit_keys).argsort(dim=1)
        return torch.empty_like(order, dtype=torch.float32).scatter_(
            1, order, self._levels.expand_as(order)
        )

    def _context(self, group: int, attention: HashAttention) -> Tensor:
        size, window = self._block_sizes[group], self._windows[group]
        positions = torch.arange(attention.max_seq_len, device=attention.ends.device)
        blocks = attention.block_tables[group][:, positions // size].long()
        words = self.caches[group][blocks * size + positions % size]
        terms = words * (self._weights[: attention.max_seq_len] * _signed(_POSITION_KEY))
        sums = torch.nn.functional.pad(terms.cumsum(dim=1), (1, 0))
        context = sums[attention.batch_idx, attention.ends]
        if window is None:
            return context
        return context - sums[attention.batch_idx, (attention.ends - window).clamp(min=0)]


def hashlm_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    windows: Sequence[int | None] = (None,),
    salt: int = 0,
) -> list[int]:
    """Return the greedy continuation of a prompt, without a runner, a cache or torch.

    Args:
        prompt: At least one token.
        num_tokens: Tokens to continue with.
        vocab_size: Of the model.
        windows: For each KV group, as for `HashLM`.
        salt: Added to each token's context before its logits are made.
    """
    keys = [_mix_int(token_id + _LOGIT_KEY) for token_id in range(vocab_size)]
    sums = [0]
    tokens = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        sums.append(sums[-1] + _term(tokens[position], position))
        if position + 1 == len(tokens):
            hidden = _hidden(sums, windows) + salt
            scores = [_signed(_mix_int(hidden + key)) for key in keys]
            tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]


def hashlm_contexts(token_ids: Sequence[int], windows: Sequence[int | None] = (None,)) -> list[int]:
    """Return what the model's forward returns for each token, as integers of 64 bits.

    Args:
        token_ids: From position 0 on.
        windows: For each KV group, as for `HashLM`.
    """
    sums, contexts = [0], []
    for position, token_id in enumerate(token_ids):
        sums.append(sums[-1] + _term(token_id, position))
        contexts.append(_signed(_hidden(sums, windows)))
    return contexts


def _term(token_id: int, position: int) -> int:
    word = _mix_int(token_id * _TOKEN_KEY + position)
    return word * (2 * position + 1) * _POSITION_KEY


def _hidden(sums: Sequence[int], windows: Sequence[int | None]) -> int:
    end = len(sums) - 1
    hidden = 0
    for window in windows:
        begin = 0 if window is None else max(end - window, 0)
        hidden = _mix_int((hidden + sums[end] - sums[begin]) * _GROUP_KEY)
    return hidden


def _mix(words: Tensor) -> Tensor:
    """Return int64 words whose every bit depends on every bit of the given ones."""
    for shift, factor in _MIX:
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return words


def _mix_int(word: int) -> int:
    """Return what `_mix` does, as an integer of 64 bits without a sign."""
    word %= _WORD
    for shift, factor in _MIX:
        word = (word ^ word >> shift) * factor % _WORD
    return word


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    return word - _WORD if word >= _WORD // 2 else word
