"""From sources to token shards; killed at any moment, a preparation resumes with the same result.

    prepare(recipe, Path("out/data"))                 # or: moesaic prepare RECIPE --out out/data

Documents pass in chunks whose borders depend on the data alone. Between chunks, every few seconds, everything written
is flushed and `progress.json` replaced: that is the checkpoint a later process resumes from. It truncates every file
back to what progress.json says and reads on from there, so however often a preparation is killed, its result is that
of one that never was. `manifest.json` is written last; with it the data is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.atomic import exclusive
from moesaic.data.dedupe import DocumentIndex
from moesaic.data.preparation.request import check_same, preparation
from moesaic.data.preparation.shard_writer import GrowingFile, ShardWriter
from moesaic.data.quality import QualityScore
from moesaic.data.records import BrokenRecord, Document, ReadPosition
from moesaic.data.shards import FORMAT, MANIFEST, read_manifest
from moesaic.data.sources import open_source
from moesaic.data.tokenizer_training import end_of_document, load_tokenizer, save_tokenizer, train_tokenizer
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.model.tokenizer import Tokenizer
from moesaic.recipe import Recipe
from moesaic.units import plural

PROGRESS = "progress.json"
CHUNK_DOCUMENTS = 512
CHUNK_CHARACTERS = 1 << 21
SAVE_SECONDS = 2.0
BROKEN_SHOWN = 5


@dataclass
class Counts:
    """Counts of the records of one source."""

    name: str
    documents: int = 0  # kept
    tokens: int = 0
    characters: int = 0
    held_out: int = 0  # of the kept documents
    taken: int = 0  # read whole, whether kept or not
    empty: int = 0
    duplicate: int = 0
    near_duplicate: int = 0
    broken: int = 0
    first_broken: list[str] = field(default_factory=list)


@dataclass
class Status:
    """What a progress bar shows."""

    doing: str
    done: int
    size: int
    documents: int = 0
    tokens: int = 0


@dataclass
class Prepared:
    """The result of a preparation, now or earlier."""

    directory: str
    already: bool
    manifest: dict[str, Any]

    @property
    def counts(self) -> list[Counts]:
        return [Counts(**source) for source in self.manifest["sources"]]


def prepare(
    recipe: Recipe, out: Path, *, strict: bool = False, on_status: Callable[[Status], None] = lambda status: None
) -> Prepared:
    """Prepare the recipe's data in `out`, or resume that, or find it done."""
    if not recipe.data.sources:
        raise UserError("data.sources", "the recipe names no source of text", "Add one, such as builtin:stdlib.")
    names = [source.name for source in recipe.data.sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError("data.sources", f'two sources have the name "{twice[0]}"', "Give each a name of its own.")
    try:
        with exclusive(out):
            if (out / MANIFEST).exists():
                manifest = read_manifest(out)
                check_same(manifest, recipe, out)
                _clean_up(out)
                return Prepared(str(out), True, manifest)
            return Prepared(str(out), False, _Preparation(recipe, out, strict, on_status).run())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(out, "the disk is full", "Free some space and run the same command; it resumes.") from error


def has_progress(out: Path) -> bool:
    """Whether there is something to resume from; the first to be saved is the tokenizer."""
    return (out / PROGRESS).exists() or (out / MANIFEST).exists()


class _Preparation:
    def __init__(self, recipe: Recipe, out: Path, strict: bool, on_status: Callable[[Status], None]) -> None:
        self.recipe, self.data, self.out, self.strict, self.on_status = recipe, recipe.data, out, strict, on_status
        self.corpora = [open_source(source) for source in self.data.sources]
        self.scorers = self._scorers()
        found = _read_progress(out)
        self.request = preparation(recipe, self.corpora)
        if found is not None:
            check_same(found, recipe, out, self.corpora)
        self.progress: dict[str, Any] = found or {"request": self.request}
        self.tokenizer = self._tokenizer()
        self.end = end_of_document(self.tokenizer)

    def run(self) -> dict[str, Any]:
        work = self.out / "work"
        progress = self.progress
        columns = sorted({*self.scorers, *chain.from_iterable(source.columns for source in self.data.sources)})
        counts = [Counts(**entry) for entry in progress.get("counts", [])]
        counts += [Counts(source.name) for source in self.data.sources[len(counts) :]]
        index = DocumentIndex(self.data.dedupe, work, progress.get("seen"))
        broken = GrowingFile(self.out / "broken.jsonl", progress.get("broken", 0))
        writer = ShardWriter(self.out, len(self.tokenizer), columns, self.data.shard_tokens, progress.get("shards"))

        def save(source: int, place: ReadPosition) -> None:
            progress.update(
                shards=writer.state(),
                seen=index.state(),
                broken=broken.sync(),
                counts=[asdict(entry) for entry in counts],
                source=source,
                place=asdict(place),
            )
            atomic.write_json(self.out / PROGRESS, progress)

        saved = time.monotonic()
        first = progress.get("source", 0)
        for number in range(first, len(self.corpora)):
            start = ReadPosition(**progress["place"]) if number == first and "place" in progress else ReadPosition()
            for chunk, broken_ones, place in self._chunks(number, start, counts[number]):
                self._report_broken(broken_ones, counts[number], broken)
                self._add(chunk, number, counts[number], index, writer, columns)
                self._report_status(number, place, counts)
                if time.monotonic() - saved > SAVE_SECONDS:
                    save(number, place)
                    saved = time.monotonic()
            self._check_source(counts[number], number)
            save(number + 1, ReadPosition())
        shards = writer.finish()
        index.close()
        broken.close()
        if not broken.size:
            broken.path.unlink()
        return self._finish(shards, counts, columns)

    # -- the steps, in order

    def _scorers(self) -> dict[str, QualityScore]:
        named: dict[str, QualityScore] = {}
        if self.data.quality is not None:
            named["quality"] = self.recipe.build("data.quality", QualityScore)
        for number, method in enumerate(self.data.scores):
            if method.name in named:
                raise UserError("data.scores", f"{method.name} is there twice", "Each becomes a column of its name.")
            named[method.name] = self.recipe.build(f"data.scores.{number}", QualityScore)
        for scorer in named.values():
            for source in self.data.sources:
                scorer.check(source.columns, f"data.sources: {source.name}")
        wanted = {name for source in self.data.sources for name in source.columns}
        if taken := wanted & set(named):
            raise UserError("data.sources", f'the column "{min(taken)}" is also computed', "Give it another name.")
        return named

    def _tokenizer(self) -> Tokenizer:
        """The one in the directory if there is one, else a new one, which is saved there."""
        folder = self.out / "tokenizer"
        if folder.is_dir():
            return load_tokenizer(folder)
        if self.data.tokenizer is not None:
            tokenizer = load_tokenizer(self.data.tokenizer)
        else:
            share = self.data.tokenizer_sample // len(self.corpora)
            texts = chain.from_iterable(corpus.sample(share, 0) for corpus in self.corpora)
            tokenizer = train_tokenizer(self._with_status(texts), self.recipe.model.vocab)
        with atomic.replacing(folder, room=0) as fresh:
            save_tokenizer(tokenizer, fresh)
        atomic.write_json(self.out / PROGRESS, self.progress)
        return tokenizer

    def _with_status(self, texts: Iterator[str]) -> Iterator[str]:
        done = 0
        for text in texts:
            done += len(text)
            self.on_status(Status("reading text for the tokenizer", done, self.data.tokenizer_sample))
            yield text
        self.on_status(Status("training the tokenizer", self.data.tokenizer_sample, self.data.tokenizer_sample))

    def _chunks(
        self, number: int, place: ReadPosition, counts: Counts
    ) -> Iterator[tuple[list[Document], list[BrokenRecord], ReadPosition]]:
        """Records in groups, whose borders do not depend on where reading started."""
        limit = self.data.sources[number].documents
        chunk: list[Document] = []
        broken: list[BrokenRecord] = []
        characters = 0
        for record in self.corpora[number].records(place):
            if isinstance(record, BrokenRecord):
                if self.strict:
                    raise UserError(f"{record.file}:{record.line}", record.why, "Mend it, or run without --strict.")
                broken.append(record)
            elif limit is not None and counts.taken + len(chunk) >= limit:
                break
            else:
                chunk.append(record)
                characters += len(record.text)
            place = record.after
            if len(chunk) + len(broken) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
                yield chunk, broken, place
                chunk, broken, characters = [], [], 0
        if chunk or broken:
            yield chunk, broken, place

    def _report_broken(self, records: Sequence[BrokenRecord], counts: Counts, file: GrowingFile) -> None:
        for record in records:
            counts.broken += 1
            if len(counts.first_broken) < BROKEN_SHOWN:
                counts.first_broken.append(f"{record.file}:{record.line}: {record.why}")
            line = {"source": counts.name, "file": record.file, "line": record.line, "why": record.why}
            file.append(json.dumps(line).encode() + b"\n")

    def _add(
        self,
        chunk: Sequence[Document],
        number: int,
        counts: Counts,
        index: DocumentIndex,
        writer: ShardWriter,
        columns: list[str],
    ) -> None:
        counts.taken += len(chunk)
        kept = []
        for document in chunk:
            if not document.text.strip():
                counts.empty += 1
            elif (verdict := index.check(document.text)) == "new":
                kept.append(document)
            else:
                setattr(counts, verdict, getattr(counts, verdict) + 1)
        scores = {name: scorer.score(kept) for name, scorer in self.scorers.items()}
        # A special token written out in a text stays text, so that no document can end itself or pose as the user.
        self.tokenizer.fast.encode_special_tokens = True
        encodings = self.tokenizer.fast.encode_batch_fast(
            [document.text for document in kept], add_special_tokens=False
        )
        for at, (document, encoding) in enumerate(zip(kept, encodings, strict=True)):
            tokens = [*encoding.ids, self.end]
            held_out = _is_held_out(document.text, self.data.held_out)
            values = {name: document.fields.get(name, float("nan")) for name in columns}
            values |= {name: column[at] for name, column in scores.items()}
            writer.append(tokens, number, held_out, values)
            counts.documents += 1
            counts.tokens += len(tokens)
            counts.characters += len(document.text)
            counts.held_out += held_out

    def _report_status(self, number: int, place: ReadPosition, counts: Sequence[Counts]) -> None:
        done = sum(corpus.size for corpus in self.corpora[:number]) + self.corpora[number].done(place)
        self.on_status(
            Status(
                f"tokenizing {counts[number].name}",
                done,
                sum(corpus.size for corpus in self.corpora),
                sum(entry.documents for entry in counts),
                sum(entry.tokens for entry in counts),
            )
        )

    def _check_source(self, counts: Counts, number: int) -> None:
        if counts.documents > counts.held_out:
            return
        path = self.data.sources[number].path
        here = f"data.sources: {counts.name}"
        if counts.broken and not counts.taken:
            raise UserError(here, f"no record of {path} can be used; the first: {counts.first_broken[0]}")
        gone = counts.duplicate + counts.near_duplicate
        why = f"; {plural(gone, 'duplicate')} left out" if gone else "; every document is empty"
        why = "; every document is held out" if counts.documents else why
        raise UserError(here, f"{path} gives no text to train on{why}", "Leave the source out, or give it text.")

    def _finish(self, shards: list[dict[str, Any]], counts: Sequence[Counts], columns: list[str]) -> dict[str, Any]:
        manifest = {
            "format": FORMAT,
            "request": self.request,
            "vocabulary": len(self.tokenizer),
            "end_of_document": self.end,
            "tokenizer": hashlib.blake2b(self.tokenizer.files["tokenizer.json"], digest_size=16).hexdigest(),
            "columns": columns,
            "documents": sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "sources": [asdict(entry) for entry in counts],
            "shards": shards,
        }
        atomic.write_json(self.out / MANIFEST, manifest, indent=1)
        _clean_up(self.out)
        return manifest


def _is_held_out(text: str, share: float) -> bool:
    # By the text itself, so that copies of a document end on the same side.
    digest = hashlib.blake2b(text.encode(), digest_size=4, person=b"held out").digest()
    return int.from_bytes(digest, "big") < share * 2**32


def _read_progress(out: Path) -> dict[str, Any] | None:
    file, remedy = out / PROGRESS, "Remove the directory and prepare again."
    if not file.exists():
        # What begins with a dot is ours too: the lock, a file being replaced.
        if any(path.name != "tokenizer" and not path.name.startswith(".") for path in out.iterdir()):
            raise UserError(out, "is not empty, and holds no prepared data", "Name another directory.")
        shutil.rmtree(out / "tokenizer", ignore_errors=True)  # its request is not known
        return None
    found = read_json(file, remedy)
    if "request" not in found:
        raise UserError(file, "does not say what is prepared", remedy)
    return found


def _clean_up(out: Path) -> None:
    (out / PROGRESS).unlink(missing_ok=True)
    shutil.rmtree(out / "work", ignore_errors=True)
