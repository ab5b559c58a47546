"""Of curricula and quality scores."""

from __future__ import annotations

from tests.ideas.idea import Idea

IDEAS = [
    Idea(
        "data/curricula/column",
        "the user's own metric orders",
        "-values if descending else values",
        "0 * values",
        "data/test_curricula.py::TestDifficulties::test_the_metric_of_a_column_either_way",
    ),
    Idea(
        "data/curricula/consistency",
        "regular documents first",
        "by_column(data, COLUMN, descending=True)",
        "by_column(data, COLUMN, descending=False)",
        "data/test_curricula.py::TestDifficulties::test_regular_documents_come_before_exceptions",
    ),
    Idea(
        "data/curricula/length",
        "short documents first",
        "data.lengths.astype(np.float64)",
        "0.0 * data.lengths",
        "data/test_curricula.py::TestDifficulties::test_length_and_quality",
    ),
    Idea(
        "data/curricula/length",
        "harder ones are opened by and by",
        "self.start + (1 - self.start) * min(done / self.until, 1.0) ** (1 / degree)",
        "1.0",
        "data/test_curricula.py::TestPacing::test_functions",
        "data/curricula/_pacing.py",
    ),
    Idea(
        "data/curricula/multi_domain",
        "quality ascends within a domain",
        "by_column(data, self.column, self.descending)",
        "0 * by_column(data, self.column, self.descending)",
        "data/test_curricula.py::TestMultiDomain::test_quality_ascends_within_each_domain_and_domains_stay_mixed",
    ),
    Idea(
        "data/curricula/quality",
        "low quality first",
        "by_column(data, self.needs, descending=self.best_first)",
        "0 * data.lengths",
        "data/test_curricula.py::TestDifficulties::test_length_and_quality",
    ),
    Idea(
        "data/curricula/rarity",
        "rare words are surprising",
        "-np.log(np.maximum(counts, 1) / max(data.tokens, 1))",
        "np.ones(len(counts))",
        "data/test_curricula.py::TestDifficulties::test_rare_words_make_a_text_hard",
    ),
    Idea(
        "data/quality/column",
        "the record's number",
        "sign * document.fields[self.column]",
        "sign",
        "data/test_quality.py::TestColumn::test_is_the_number",
    ),
    Idea(
        "data/quality/compression",
        "what compression leaves",
        "zlib.compress(raw, self.level)",
        "raw",
        "data/test_quality.py::TestCompression::test_orders_loops_prose_and_noise",
    ),
    Idea(
        "data/quality/length",
        "longer is better",
        "math.log1p(min(len(document.text), self.max_characters or len(document.text)))",
        "0.0",
        "data/test_quality.py::test_length",
    ),
    Idea(
        "data/quality/consistency",
        "the probability of the right tokens, over several models",
        "enumerate(found):",
        "enumerate([]):",
        "data/test_quality.py::test_consistency_is_the_mean_probability_over_models",
    ),
    Idea(
        "data/quality/perplexity",
        "how well the model predicts it",
        "float(values.mean()) if",
        "nothing if",
        "data/test_quality.py::test_perplexity_is_the_models_mean_logprob",
    ),
    Idea(
        "data/quality/repetition",
        "repeated runs count once",
        "len({tuple(words[at : at + self.words]) for at in range(runs)}) / runs",
        "1.0",
        "data/test_quality.py::test_repetition",
    ),
]
