"""What a run reads: rows of a file, their tokens, and the samples made of them."""

from memtop.train.corpus.cache import TokenStore, token_cache
from memtop.train.corpus.once import fingerprint
from memtop.train.corpus.pairs import PromptResponse, RowText, Sample, Seq2SeqPairs, collate
from memtop.train.corpus.rows import Rows, open_rows, window_order
from memtop.train.corpus.tokens import ByteTokens, LibraryTokens, Tokens, load_tokens

__all__ = [
    "ByteTokens",
    "LibraryTokens",
    "PromptResponse",
    "RowText",
    "Rows",
    "Sample",
    "Seq2SeqPairs",
    "TokenStore",
    "Tokens",
    "collate",
    "fingerprint",
    "load_tokens",
    "open_rows",
    "token_cache",
    "window_order",
]
