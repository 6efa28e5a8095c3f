"""A grammar that needs no tokenizer and no library: what it allows depends on the last tokens."""

import random

import torch
from torch import Tensor
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

_WORD_BITS = 32
_NUM_LAST = 2
"""Tokens that decide what may follow."""


class MadeUpGrammar(StructuredOutputGrammar):
    """Allows about half of the vocabulary, another half after other tokens.

    Args:
        seed: Which grammar.
        vocab_size: Of the model.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._tokens: list[int] = []

    def allowed(self) -> list[int]:
        """Return the tokens that may follow what was accepted; never none."""
        draw = random.Random(f"{self._seed} {self._tokens[-_NUM_LAST:]}")
        return draw.sample(range(self._vocab_size), max(1, self._vocab_size // 2))

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take drawn tokens; say whether all were allowed."""
        for token in tokens:
            if token not in self.allowed():
                return False
            self._tokens.append(token)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first that is not allowed, and take none."""
        before = list(self._tokens)
        accepted = [token for token in tokens if self.accept_tokens("", [token])]
        self._tokens = before
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        del self._tokens[len(self._tokens) - num_tokens :]

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Set the bits of what may follow in one row."""
        words = [0] * bitmask.shape[1]
        for token in self.allowed():
            words[token // _WORD_BITS] |= 1 << token % _WORD_BITS
        signed = [word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word for word in words]
        bitmask[batch_index] = torch.tensor(signed, dtype=torch.int32)

    def is_terminated(self) -> bool:
        """Return False: a request ends by its length."""
        return False

    def reset(self) -> None:
        """Forget every token."""
        self._tokens = []


class MadeUpBackend:
    """What vLLM's manager asks of a backend whose grammars exist already."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _WORD_BITS)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Return room for masks, everything allowed."""
        return torch.full((max_num_seqs, self._num_words), -1, dtype=torch.int32)
