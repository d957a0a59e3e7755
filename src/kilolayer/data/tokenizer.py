"""SentencePiece vocabularies for translation: loaded, or trained and cached by the content that they were made from.

Ids: padding 0, unknown 1, start 2, end 3, then the tags: <2de> before a source to be translated into German, <bt> before a
back-translated source. Tags are control symbols: text that spells "<2de>" is encoded as ordinary pieces, never as the tag, and
decoding leaves tags out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from kilolayer import hints
from kilolayer.config import bounded, check
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.corpora import Corpora
from kilolayer.data.marian_pieces import read_marian_pieces
from kilolayer.data.parallel import ParallelText, blank_side
from kilolayer.data.piece_trainer import UntrainableError, train_pieces
from kilolayer.data.text import read_lines
from kilolayer.errors import InputError, OptionError, UnusedOptionError, unknown
from kilolayer.files.paths import kind_of, storable
from kilolayer.files.reading import read_bytes
from kilolayer.files.writing import remove, write

PAD, UNKNOWN, START, END = 0, 1, 2, 3
SYNTHETIC = "<bt>"
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: Python text may hold it, UTF-8 may not
SKIPPED = re.compile("[\ud800-\udfff\u2585]")  # SentencePiece trains on no line with U+2585, which it reserves
LONGEST_LINE = 1000  # characters; nor on a line of more than 4,192 bytes
SPACE = "\u2581"  # what SentencePiece writes for a space inside its pieces
THREADS = 16  # SentencePiece's default; its sums, and so its pieces, depend on this number alone
SHARED_FILE = "tokenizer.model"
SIDE_FILES = ("tokenizer.source.model", "tokenizer.target.model")
BYTE_BPE_FILE = "tokenizer.json"
LEAST_BYTE_BPE = END + 1 + 256  # the special tokens and all bytes


DEFAULT_SIZE = 8000


class SmallTextError(OptionError):
    """A text does not give as many pieces as asked for. most: as many as it gives."""

    most = 0


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """`[tokenizer]`: how text is cut into tokens."""

    path: str | None = None
    """An existing tokenizer: a SentencePiece model, or the folder of a Marian model; with kind = "byte_bpe", a tokenizer.json,
    or a folder with vocab.json and merges.txt; with "wordpiece", a tokenizer.json, or a folder with vocab.txt. Default: one is
    trained on the training text."""
    kind: Literal["unigram", "bpe", "byte_bpe", "wordpiece", "bytes"] = "unigram"
    """SentencePiece's unigram or bpe; for language models also GPT-2's byte_bpe, or bytes, where each byte is a token.
    wordpiece is BERT's, for encoders, and can only be loaded from path."""
    vocab_size: int | None = bounded(None, least=8, most=2**24)
    """Number of tokens in the vocabulary, including special tokens and tags. Default: 8000, which suits tens of
    thousands of pairs, or as many as a smaller text gives."""
    byte_fallback: bool = True
    """Encode characters outside the vocabulary as bytes, so that there are no unknown tokens."""
    shared: bool = True
    """One vocabulary for source and target. False: two vocabularies, for a single direction, each with its own embedding
    table."""
    character_coverage: float = bounded(0.9995, least=0.9, most=1)
    """Fraction of the text's characters that the vocabulary covers."""
    normalization: Literal["nmt_nfkc", "nfkc", "identity"] = "nmt_nfkc"
    """Normalization before the text is split: Unicode NFKC and white space, NFKC only, or none, as language models need."""
    sentences: int = bounded(2_000_000, least=1, most=10**9)
    """Maximum number of sentences to train the tokenizer on; if there are more, every n-th is used. data.temperature balances
    the languages."""

    def __post_init__(self) -> None:
        check(self)
        byte_bpe, word_pieces = self.kind == "byte_bpe", self.kind == "wordpiece"
        if word_pieces and self.path is None:
            raise OptionError("WordPiece vocabularies cannot be trained", fix="set tokenizer.path to an existing one")
        # Accepted, because byte-level BPE never normalizes.
        trained = {"kind", "path", "vocab_size", "sentences"} | (
            {"normalization"} if self.normalization == "identity" else set()
        )
        for name, given, what, used in (
            (
                "path",
                self.path is not None,
                "a vocabulary that exists",
                {"path", "kind"} if byte_bpe or word_pieces else {"path"},
            ),
            ("kind", self.of_bytes, "bytes", {"kind"}),
            ("kind", byte_bpe, "byte-level BPE", trained),
        ):
            for field in dataclasses.fields(self):
                usual = (None, DEFAULT_SIZE) if field.name == "vocab_size" else (field.default,)
                if given and field.name not in used and getattr(self, field.name) not in usual:
                    raise UnusedOptionError(
                        f"{field.name} has no effect on {what}",
                        fix=f"remove it, or {name}",
                        unused=field.name,
                        beside=(name,),
                        either=True,
                    )
        if byte_bpe and self.size < LEAST_BYTE_BPE:
            raise OptionError(
                f"vocab_size is {self.vocab_size}",
                fix=f"byte-level BPE has {END + 1} special tokens and 256 bytes: {LEAST_BYTE_BPE} or more",
            )

    @property
    def size(self) -> int:
        """The number of tokens to train; without `vocab_size`, a text that gives fewer is not refused."""
        return DEFAULT_SIZE if self.vocab_size is None else self.vocab_size

    def resolved(self, size: int) -> TokenizerConfig:
        """With an absolute path, and the size of the vocabulary if one was trained and its size not given."""
        if self.path is not None:
            return dataclasses.replace(self, path=str(storable(Path(self.path))))
        return self if self.vocab_size is not None or self.of_bytes else dataclasses.replace(self, vocab_size=size)

    @property
    def of_bytes(self) -> bool:
        """Whether tokens are bytes, so that there is nothing to train."""
        return self.kind == "bytes"


class Tokenizer:
    """A SentencePiece model: converts text to ids and back, and accepts any text."""

    def __init__(self, model: bytes, where: str = "") -> None:
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
            self._pieces.id_to_piece(list(range(self.vocab_size)))  # the damage may be in one piece only
        except (RuntimeError, UnicodeDecodeError):
            raise InputError(
                "not a SentencePiece model",
                where=where,
                fix=f"give the .model file of `spm_train` or `{hints.verb('train')}`",
            ) from None
        ids = tuple(getattr(self._pieces, name)() for name in ("pad_id", "unk_id", "bos_id", "eos_id"))
        if ids != (PAD, UNKNOWN, START, END):
            raise InputError(
                f"the vocabulary has padding, unknown, start and end at {', '.join(map(str, ids))}",
                where=where,
                fix="train it with --pad_id=0 --unk_id=1 --bos_id=2 --eos_id=3",
            )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a model file."""
        return cls(read_bytes(path), where=str(path))

    def save(self, path: Path) -> None:
        """Write the model file."""
        write(path, self.model)

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self._pieces.vocab_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without start, end or tags."""
        return self._pieces.encode([SURROGATE.sub("\ufffd", line) for line in lines])

    def decode(self, ids: Sequence[Iterable[int]]) -> list[str]:
        """The text of each sequence. Padding, start, end, tags and ids out of range are skipped."""
        size = self.vocab_size
        return [self._pieces.decode([token for token in map(int, row) if 0 <= token < size]) for row in ids]

    def byte_lengths(self) -> list[int]:
        """The bytes of text that each token represents, if text is not normalized; 0 for special tokens and tags."""

        def bytes_of(token: int) -> int:
            if self._pieces.is_control(token) or self._pieces.is_unknown(token):
                return 0
            return 1 if self._pieces.is_byte(token) else len(self._pieces.id_to_piece(token).replace(SPACE, " ").encode())

        return [bytes_of(token) for token in range(self.vocab_size)]

    @property
    def pieces(self) -> list[str]:
        """The piece of each id."""
        return self._pieces.id_to_piece(list(range(self.vocab_size)))

    def score(self, token: int) -> float:
        """The score by which SentencePiece ranks a piece."""
        return self._pieces.get_score(token)

    def is_reserved(self, token: int) -> bool:
        """Whether text is never split into this piece: a special token, a tag, or a byte of byte fallback."""
        return any(getattr(self._pieces, f"is_{kind}")(token) for kind in ("control", "unknown", "byte", "unused"))

    def is_unused(self, token: int) -> bool:
        """Whether the piece only reserves its id: in a vocabulary for two languages, one that belongs to the other side."""
        return self._pieces.is_unused(token)

    @property
    def has_space(self) -> bool:
        """Whether a single space is a piece."""
        return self._pieces.piece_to_id(SPACE) != UNKNOWN

    def byte_id(self, byte: int) -> int:
        """The token of a byte; UNKNOWN if the vocabulary has none."""
        return self._pieces.piece_to_id(f"<0x{byte:02X}>")

    def tag_id(self, language: str) -> int:
        """The id of <2language>."""
        token = self._pieces.piece_to_id(f"<2{language}>")
        if token == UNKNOWN:
            raise unknown(language, self.languages, kind="language", where="in the vocabulary's tags")
        return token

    @property
    def languages(self) -> list[str]:
        """The languages that have a tag."""
        pieces = (self._pieces.id_to_piece(token) for token in range(self.vocab_size) if self._pieces.is_control(token))
        return [piece[2:-1] for piece in pieces if piece.startswith("<2") and piece.endswith(">")]

    @property
    def synthetic_id(self) -> int:
        """The id of <bt>."""
        token = self._pieces.piece_to_id(SYNTHETIC)
        if token == UNKNOWN:
            raise OptionError(f"the vocabulary has no {SYNTHETIC}", fix=f"train it with --control_symbols={SYNTHETIC}")
        return token


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the two sides: one object where the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer

    @property
    def shared(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.source is self.target

    @property
    def one_table(self) -> bool:
        """Whether an id means the same piece on both sides, so that they can share an embedding table."""
        return self.shared or self.source.pieces == self.target.pieces

    @property
    def digest(self) -> str:
        """A digest that identifies the vocabularies."""
        return hashlib.sha256(self.source.model + self.target.model).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.model, and remove the two side files, which `load` would prefer; if not shared, write the two."""
        if self.shared:
            self.source.save(folder / SHARED_FILE)
            for name in SIDE_FILES:
                remove(folder / name)
        else:
            self.source.save(folder / SIDE_FILES[0])
            self.target.save(folder / SIDE_FILES[1])

    @classmethod
    def load(cls, folder: Path) -> Tokenizers:
        """Load what `save` wrote."""
        if kind_of(folder / SIDE_FILES[0]) is not None:
            return cls(Tokenizer.load(folder / SIDE_FILES[0]), Tokenizer.load(folder / SIDE_FILES[1]))
        both = Tokenizer.load(folder / SHARED_FILE)
        return cls(both, both)


def load_tokenizers(path: Path) -> Tokenizers:
    """Load a SentencePiece model, or the two of a Marian model's folder."""
    if kind_of(path) == "folder":
        source, target = (Tokenizer(model, where=str(path)) for model in read_marian_pieces(path).models)
        return Tokenizers(source, source if source.model == target.model else target)
    both = Tokenizer.load(path)
    return Tokenizers(both, both)


def tokenizers_for(corpora: Corpora, config: TokenizerConfig, cache: Path) -> Tokenizers:
    """The configured vocabularies, or vocabularies trained on the training text (without synthetic corpora) and cached."""
    if config.path is not None:
        found = load_tokenizers(Path(config.path))
        for language in corpora.tags:
            found.source.tag_id(language)
        return found
    if not config.shared and len(corpora.directions) > 1:
        raise OptionError("two vocabularies cannot serve several directions", where="tokenizer", fix="set shared = true")
    texts = [text for text in corpora.train if not text.synthetic] or corpora.train
    tags = [*(f"<2{language}>" for language in corpora.tags), SYNTHETIC]
    parts = {SHARED_FILE: (0, 1)} if config.shared else {name: (side,) for side, name in enumerate(SIDE_FILES)}
    samples = {name: _sampled(texts, sides, config.sentences, corpora.temperature) for name, sides in parts.items()}
    uses = [(text.direction.name, text.columns) for text in texts]
    rates = [[str(each.rate) for each in sides] for sides in samples.values()]
    settings = ["pairs 2", dataclasses.asdict(config), tags, uses, rates, sentencepiece.__version__]
    key = content_key(settings, [file for text in texts for file in text.files], cache)

    def build(draft: Path) -> None:
        for name, sides in samples.items():

            def lines(sides: Sequence[_SampledSide] = sides) -> Iterator[str]:
                return (line for side in sides for line in side.lines())

            (draft / name).write_bytes(
                train_fitting(lambda fitting, lines=lines: train_tokenizer(lines(), fitting, tags), config)
            )

    try:
        return Tokenizers.load(built(cache / f"tokenizer-{key}", build))
    except OptionError as error:
        raise next((fault for text in texts if (fault := blank_side(text)) is not None), error) from None


def train_fitting(train: Callable[[TokenizerConfig], bytes], config: TokenizerConfig) -> bytes:
    """Train a vocabulary of the configured size; if no size is configured, one that a small text can give."""
    try:
        return train(dataclasses.replace(config, vocab_size=config.size))
    except SmallTextError as error:
        if config.vocab_size is not None:
            raise
        return train(dataclasses.replace(config, vocab_size=error.most))


def train_tokenizer(
    lines: Iterable[str],
    config: TokenizerConfig,
    tags: Sequence[str] = (SYNTHETIC,),
    *,
    exact: bool = False,
    required: str = "",
) -> bytes:
    """Train a SentencePiece model on `lines`; `tags` get the first ids after the special tokens. Equal input gives equal bytes.

    exact: keep every space, and make the line feed a token, so that decoding reproduces the text.
    required: characters that get a piece however rare they are; each must occur.
    """
    exactly: dict[str, Any] = {
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["\n"],
    }
    options = {
        "model_type": config.kind,
        "vocab_size": config.vocab_size,
        "byte_fallback": config.byte_fallback,
        "character_coverage": config.character_coverage,
        "normalization_rule_name": config.normalization,
        "control_symbols": list(tags),
        "pad_id": PAD,
        "unk_id": UNKNOWN,
        "bos_id": START,
        "eos_id": END,
        "shuffle_input_sentence": False,
        "num_threads": THREADS,
        "minloglevel": 2,
        **(exactly if exact else {}),
        **({"required_chars": required} if required else {}),
    }
    try:
        return train_pieces((SKIPPED.sub("\ufffd", part).encode() for line in lines for part in short_parts(line)), options)
    except UntrainableError as error:
        raise _untrainable(str(error), config) from None


def short_parts(line: str) -> Sequence[str]:
    """Split a line into parts of at most LONGEST_LINE characters, before spaces if possible; none of an empty line."""
    cuts = [0]
    while len(line) - cuts[-1] > LONGEST_LINE:
        space = line.rfind(" ", cuts[-1] + 1, cuts[-1] + LONGEST_LINE)
        cuts.append(cuts[-1] + LONGEST_LINE if space < 0 else space)
    return [line[a:b] for a, b in zip(cuts, [*cuts[1:], len(line)], strict=True) if a < b]


@dataclass(frozen=True)
class _SampledSide:
    """One side (0 source, 1 target) of a text, and how often each line is used: 1/6 is every sixth, 5/2 is alternately 3 and
    2 times."""

    text: ParallelText
    side: int
    rate: Fraction

    def lines(self) -> Iterator[str]:
        files = self.text.files
        lines = read_lines(files[self.side]) if len(files) == 2 else (pair[self.side] for pair in self.text.pairs())
        owed = 0
        for line in lines:
            owed += self.rate.numerator
            while owed > 0:
                yield line
                owed -= self.rate.denominator


def _sampled(texts: Sequence[ParallelText], sides: Sequence[int], limit: int, temperature: float) -> list[_SampledSide]:
    """The given sides of the texts, sampled to about `limit` lines at most; a file used in several directions counts once.

    Languages share the lines by p ~ n^(1/temperature), as directions share an epoch. A language with little text is repeated,
    so that it gets its own pieces.
    """
    files: dict[tuple[Path, str], tuple[ParallelText, int]] = {}
    for text in texts:
        for side, language in enumerate((text.direction.source, text.direction.target)):
            if side in sides:
                files.setdefault((text.files[side % len(text.files)], language), (text, side))
    sizes: dict[str, int] = {}
    for (_, language), (text, _) in files.items():
        sizes[language] = sizes.get(language, 0) + text.size
    total = sum(sizes.values())
    every = -(-total // limit)
    levelled = {language: size ** (1 / temperature) for language, size in sizes.items()}
    scale = total / sum(levelled.values())
    # Rounded, so that floating-point error does not decide which lines are used.
    rates = {language: Fraction(scale * levelled[language] / size).limit_denominator(1000) for language, size in sizes.items()}
    return [_SampledSide(text, side, rates[language] / every) for (_, language), (text, side) in files.items()]


def _untrainable(message: str, config: TokenizerConfig) -> OptionError:
    """The error with SentencePiece's reason, and a fix."""
    if "sentences_.empty()" in message:
        return OptionError("no vocabulary can be made: the text has only white space", where="tokenizer", fix="give other text")
    what = f"a vocabulary of {config.vocab_size} pieces cannot be made from this text"
    if high := re.search(r"value <= (\d+)", message):
        found = SmallTextError(what, where="tokenizer", fix=f"set tokenizer.vocab_size to {high[1]} or less, or give more text")
        found.most = int(high[1])
        return found
    if low := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        fix = f"set tokenizer.vocab_size to {low[1]} or more, or lower character_coverage"
    else:
        fix = f"SentencePiece says: {' '.join(message.split())}"
    return OptionError(what, where="tokenizer", fix=fix)
