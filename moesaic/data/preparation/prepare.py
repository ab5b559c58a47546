"""From sources to token shards; killed at any moment, a preparation resumes with the same result.

    prepare(recipe, Path("out/data"))                 # or: moesaic prepare RECIPE --out out/data [--engine ray]

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
from typing import Any, Literal

from moesaic import atomic
from moesaic.atomic import exclusive
from moesaic.data.columns import scorers
from moesaic.data.dedupe import DocumentIndex, Verdict
from moesaic.data.preparation.examination import (
    Examination,
    Examined,
    Examiner,
    column_values,
    encoded,
    is_held_out,
)
from moesaic.data.preparation.request import check_same, preparation
from moesaic.data.preparation.shard_writer import GrowingFile, ShardWriter
from moesaic.data.quality import QualityScore
from moesaic.data.record_rows import keep_rows, listed, row_size
from moesaic.data.records import BrokenRecord, Document, ReadPosition
from moesaic.data.shards import FORMAT, MANIFEST, Shards, read_manifest
from moesaic.data.sources import open_source
from moesaic.data.tokenizer_training import end_of_document, load_tokenizer, save_tokenizer, train_tokenizer
from moesaic.data.topics.find import find_topics
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
class Taken:
    """Where documents go."""

    index: DocumentIndex
    writer: ShardWriter
    broken: GrowingFile
    rows: GrowingFile  # a list of them
    columns: list[str]


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
    recipe: Recipe,
    out: Path,
    *,
    strict: bool = False,
    on_status: Callable[[Status], None] = lambda status: None,
    examiner: Examiner | None = None,
) -> Prepared:
    """Prepare the recipe's data in `out`, or resume that, or find it done; with others that look at documents
    (`on_ray.RayExaminer`), or in this process."""
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
                prepared = Prepared(str(out), True, manifest)
            else:
                prepared = Prepared(str(out), False, _Preparation(recipe, out, strict, on_status, examiner).run())
            if recipe.data.topics is not None:
                find_topics(Shards(out), recipe.data.topics, lambda *at: on_status(Status("finding topics", *at)))
            return prepared
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(out, "the disk is full", "Free some space and run the same command; it resumes.") from error


def has_progress(out: Path) -> bool:
    """Whether there is something to resume from; the first to be saved is the tokenizer."""
    return (out / PROGRESS).exists() or (out / MANIFEST).exists()


class _Preparation:
    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        strict: bool,
        on_status: Callable[[Status], None],
        examiner: Examiner | None = None,
    ) -> None:
        self.recipe, self.data, self.out, self.strict, self.on_status = recipe, recipe.data, out, strict, on_status
        self.examiner = examiner
        self.corpora = [open_source(source) for source in self.data.sources]
        self.scorers, self.row_size = self._scorers(), row_size(self.data)
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
        rows = GrowingFile(work / "rows.jsonl", progress.get("rows", 0))
        writer = ShardWriter(self.out, len(self.tokenizer), columns, self.data.shard_tokens, progress.get("shards"))

        def save(source: int, place: ReadPosition) -> None:
            progress.update(
                shards=writer.state(),
                seen=index.state(),
                broken=broken.sync(),
                rows=rows.sync(),
                counts=[asdict(entry) for entry in counts],
                source=source,
                place=asdict(place),
            )
            atomic.write_json(self.out / PROGRESS, progress)

        saved = time.monotonic()
        first = progress.get("source", 0)
        for number in range(first, len(self.corpora)):
            start = ReadPosition(**progress["place"]) if number == first and "place" in progress else ReadPosition()
            take = self._take_examined if self.examiner is not None else self._take
            for place in take(number, start, counts[number], Taken(index, writer, broken, rows, columns)):
                self._report_status(number, place, counts)
                if time.monotonic() - saved > SAVE_SECONDS:
                    save(number, place)
                    saved = time.monotonic()
            self._check_source(counts[number], number)
            save(number + 1, ReadPosition())
        shards = writer.finish()
        index.close()
        broken.close()
        rows.close()
        if self.row_size is not None:
            keep_rows(self.out, rows.path, self.row_size)
        if not broken.size:
            broken.path.unlink()
        return self._finish(shards, counts, columns)

    def _take(self, number: int, start: ReadPosition, counts: Counts, into: Taken) -> Iterator[ReadPosition]:
        """A source from a position on; the positions up to which all is taken, once in a while."""
        for chunk, broken, place in self._chunks(number, start, counts):
            self._report_broken(broken, counts, into.broken)
            self._add(chunk, number, counts, into)
            yield place

    def _take_examined(self, number: int, start: ReadPosition, counts: Counts, into: Taken) -> Iterator[ReadPosition]:
        """The same, of documents that others have read and examined."""
        assert self.examiner is not None
        settings = self.data.dedupe, self.scorers, into.columns, self.data.held_out
        limit = self.data.sources[number].documents
        place = start
        for group in self.examiner.examine(self.corpora[number], start, Examination(self.tokenizer.files, *settings)):
            for record in group:
                if isinstance(record, BrokenRecord):
                    self._refuse_broken(record)
                    self._report_broken([record], counts, into.broken)
                elif limit is not None and counts.taken >= limit:
                    return
                else:
                    counts.taken += 1
                    if _is_new(into.index.admit(record.keys) if record.characters else "empty", counts):
                        self._write(record, number, counts, into)
                place = record.after
            yield place

    # -- the steps, in order

    def _scorers(self) -> dict[str, QualityScore]:
        named = scorers(self.recipe)
        if self.examiner is not None and (batched := [name for name, one in named.items() if not one.one_by_one]):
            problem = f"{batched[0]} scores documents in batches, whose borders are those of one process"
            raise UserError("data.scores", problem, "Prepare without --engine, or leave it out.")
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
                self._refuse_broken(record)
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

    def _refuse_broken(self, record: BrokenRecord) -> None:
        if self.strict:
            raise UserError(f"{record.file}:{record.line}", record.why, "Mend it, or run without --strict.")

    def _report_broken(self, records: Sequence[BrokenRecord], counts: Counts, file: GrowingFile) -> None:
        for record in records:
            counts.broken += 1
            if len(counts.first_broken) < BROKEN_SHOWN:
                counts.first_broken.append(f"{record.file}:{record.line}: {record.why}")
            line = {"source": counts.name, "file": record.file, "line": record.line, "why": record.why}
            file.append(json.dumps(line).encode() + b"\n")

    def _add(self, chunk: Sequence[Document], number: int, counts: Counts, into: Taken) -> None:
        counts.taken += len(chunk)
        kept = []
        for document in chunk:
            if _is_new(into.index.check(document.identity) if document.text.strip() else "empty", counts):
                kept.append(document)
        scores = {name: scorer.score(kept) for name, scorer in self.scorers.items()}
        for at, (document, (tokens, rows)) in enumerate(zip(kept, encoded(self.tokenizer, kept), strict=True)):
            held_out = is_held_out(document.identity, self.data.held_out)
            values = column_values(document, into.columns, {name: column[at] for name, column in scores.items()})
            size = len(document.text)
            self._write(Examined(document.after, size, None, tokens, held_out, values, rows), number, counts, into)

    def _write(self, document: Examined, number: int, counts: Counts, into: Taken) -> None:
        for placed in document.rows:
            into.rows.append(listed(placed, into.writer.total))
        into.writer.append(document.tokens, number, document.held_out, document.columns)
        counts.documents += 1
        counts.tokens += len(document.tokens)
        counts.characters += document.characters
        counts.held_out += document.held_out

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


def _is_new(verdict: Verdict | Literal["empty"], counts: Counts) -> bool:
    if verdict != "new":
        setattr(counts, verdict, getattr(counts, verdict) + 1)
    return verdict == "new"


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
    atomic.sweep_files(out)
