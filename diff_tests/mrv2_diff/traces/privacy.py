"""What people wrote and were answered, replaced by noise of the same length.

Token ids become a keyed hash of all tokens up to theirs: equal prefixes give equal noise, as a
prefix cache needs, and nothing else is kept of them. Grammar masks keep how many tokens they allow,
request ids become numbers. The key is made anew for each recording, and forgotten with it.

Drawn tokens are noise as well, so a replay has nothing to compare them with: it compares runners.
"""

import hashlib
import random
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from mrv2_diff.traces.events import (
    Event,
    Executed,
    Known,
    Mask,
    NewRequest,
    Output,
    Params,
    Sampled,
)


class Noise:
    """Replaces the contents of one recording's events.

    Args:
        vocab_size: Noise is below it.
        key: 32 secret bytes; made anew by default.
    """

    def __init__(self, vocab_size: int, key: bytes | None = None) -> None:
        self._vocab_size = vocab_size
        self._key = secrets.token_bytes(32) if key is None else key
        self._random = random.Random(int.from_bytes(self._key, "big"))
        self._names: dict[str, str] = {}
        self._chains: dict[str, bytes] = {}
        """By request: the hash of all its tokens so far."""
        self._ids: dict[int, int] = {}
        self._num_names = 0

    def of(self, event: Event) -> Event:
        """Return an event without what people wrote."""
        if isinstance(event, Executed):
            return self._executed(event)
        if isinstance(event, Sampled):
            names = [self._name(name) for name in event.req_ids]
            return Sampled(event.step, names, self._mask(event.mask))
        return Output(
            event.step,
            [self._name(name) for name in event.req_ids],
            [
                self._extend(name, tokens)
                for name, tokens in zip(event.req_ids, event.token_ids, strict=True)
            ],
        )

    def _executed(self, event: Executed) -> Executed:
        fresh = {new.req_id for new in event.new}
        finished = [self._name(name) for name in event.finished_req_ids]
        for name in event.finished_req_ids:
            self._chains.pop(name, None)
            if name in fresh:  # the id is used again: another request
                self._names.pop(name, None)
        new = [self._new_request(request) for request in event.new]
        result = Executed(
            new,
            self._known(event.known),
            {self._name(name): count for name, count in event.num_scheduled_tokens.items()},
            finished,
            self._named(event.preempted_req_ids),
            event.new_block_ids_to_zero,
            event.kv_cache_block_copies,
            event.has_structured_output_requests,
            event.pending_structured_output_tokens,
        )
        return result

    def _known(self, known: Known) -> Known:
        return Known(
            [self._name(name) for name in known.req_ids],
            [self._name(name) for name in known.resumed_req_ids],
            {
                self._name(name): self._chain(b"", token_ids)[0]
                for name, token_ids in known.all_token_ids.items()
            },
            known.new_block_ids,
            known.num_computed_tokens,
            known.num_output_tokens,
        )

    def _new_request(self, request: NewRequest) -> NewRequest:
        prompt, self._chains[request.req_id] = self._chain(b"", request.prompt)
        return NewRequest(
            self._name(request.req_id),
            prompt,
            self._params(request.params),
            request.block_ids,
            request.num_computed_tokens,
        )

    def _params(self, params: Params) -> Params:
        """Return parameters whose lists of tokens are other tokens; what ends an answer stays."""
        keep = set(params.all_stop_token_ids)
        bias, words = params.logit_bias, params.bad_words_token_ids
        return msgspec.structs.replace(
            params,
            logprob_token_ids=self._others(params.logprob_token_ids, keep),
            allowed_token_ids=self._others(params.allowed_token_ids, keep),
            logit_bias=None
            if bias is None
            else {self._other(token, keep): value for token, value in bias.items()},
            bad_words_token_ids=None
            if words is None
            else [self._others(word, keep) or [] for word in words],
        )

    def _others(self, token_ids: list[int] | None, keep: set[int]) -> list[int] | None:
        return None if token_ids is None else [self._other(token, keep) for token in token_ids]

    def _other(self, token: int, keep: set[int]) -> int:
        """Return the token that stands for another throughout; different ones for different."""
        if token in keep:
            return token
        if not self._ids:
            shuffled = list(range(self._vocab_size))
            self._random.shuffle(shuffled)
            self._ids = dict(enumerate(shuffled))
        return self._ids[token]

    def _extend(self, name: str, token_ids: Sequence[int]) -> list[int]:
        noise, self._chains[name] = self._chain(self._chains.get(name, b""), token_ids)
        return noise

    def _chain(self, chain: bytes, token_ids: Sequence[int]) -> tuple[list[int], bytes]:
        noise = []
        for token in token_ids:
            data = chain + token.to_bytes(4, "little")
            chain = hashlib.blake2b(data, key=self._key, digest_size=24).digest()
            noise.append(int.from_bytes(chain[:8], "little") % self._vocab_size)
        return noise, chain

    def _mask(self, mask: Mask) -> Mask:
        """Return masks that allow as many tokens, others."""
        bits = np.unpackbits(mask.array().view(np.uint8), axis=1, bitorder="little")
        draw = np.random.default_rng(self._random.getrandbits(64))
        bits[:, : self._vocab_size] = draw.permuted(bits[:, : self._vocab_size], axis=1)
        return Mask.of(np.packbits(bits, axis=1, bitorder="little").view(np.int32))

    def _named(self, names: list[str] | None) -> list[str] | None:
        return None if names is None else [self._name(name) for name in names]

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{self._num_names}"
            self._num_names += 1
        return self._names[name]
