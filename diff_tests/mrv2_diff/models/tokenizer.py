"""A byte-level BPE tokenizer of exactly `VOCAB_SIZE` ids, each of which decodes to something.

Ids 0 to 255 are the bytes, then come pairs of letters that English uses often, then the two
special tokens. 331 is prime: no block, tile or vector length divides the vocabulary, so a kernel
that forgets its mask at the end of a row is found out.
"""

import json
from pathlib import Path

VOCAB_SIZE = 331
BOS_ID = 329
EOS_ID = 330

_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le "
    "ve co me de hi ri ro ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec "
    "pr no ct us ac ot il tr ly nc et ut wa"
)


def write_tokenizer(directory: Path, max_positions: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # loads a native library

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = _PAIRS.split()
    vocabulary = {symbol: token_id for token_id, symbol in enumerate([*symbols, *pairs])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in pairs])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<bos>") == BOS_ID
    assert tokenizer.token_to_id("<eos>") == EOS_ID
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": max_positions,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
