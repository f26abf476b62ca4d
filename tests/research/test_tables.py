"""Tables of made-up results say what these are."""

import pytest

from research import tables
from research.claims import CLAIMS, worded
from research.comparison import estimate
from research.store import ResultStore
from research.tables import SPECS, Table, all_tables, runs_table
from tests.research.results_made_up import SCOPE, made_up_store


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ResultStore:
    return made_up_store(tmp_path_factory.mktemp("results"))


def row_of(table: Table, *labels: str) -> dict[str, str]:
    (found,) = [row for row in table.rows if tuple(row[: len(labels)]) == labels]
    return dict(zip(table.columns, found, strict=True))


def run_table(name: str, store: ResultStore) -> Table:
    (spec,) = [spec for spec in SPECS if spec.name == name]
    return runs_table(spec, store, SCOPE)


def test_claims_are_judged_by_the_runs(store):
    """Everything falls by a fifth under gimbal, and throughput stays."""
    table = tables.claims_table(store, SCOPE)
    assert len(table.rows) == len(CLAIMS)
    row = row_of(table, "e2e: gimbal against vllm")
    assert row["paper"] == "-32.0%" and row["paper_like"] == "-20.0% (-20.0 to -20.0) confirmed"
    assert row_of(table, "ttft: gimbal against vllm", "7.3")["graph"] == "-20.0% (-20.0 to -20.0) weaker"
    assert row_of(table, "tpot: gimbal against moetuner")["eager"] == "-11.1% (-11.1 to -11.1) weaker"
    assert row_of(table, "throughput: gimbal against vllm, highest load")["graph"] == "+0.0% (+0.0 to +0.0) not seen"
    assert row_of(table, "throughput: gimbal against vllm, 2.5 requests/s")["graph"] == "-"


def test_one_value_has_no_interval():
    assert [tables.change_text(estimate([-0.2] * count)) for count in (0, 1, 2)] == [
        "-",
        "-20.0%",
        "-20.0% (-20.0 to -20.0)",
    ]


def test_verdicts_add_up(store, tmp_path):
    for found in (store, ResultStore(tmp_path / "results.jsonl")):
        for row in tables.verdicts_table(found, SCOPE).rows:
            assert sum(map(int, row[1:])) == len(CLAIMS)


def test_the_baseline_is_not_compared_with_itself(store):
    table = run_table("topics", store)
    assert row_of(table, "graph", "vllm")["TPOT, change"] == "-"
    assert row_of(table, "graph", "gimbal+")["TPOT, change"] == "-30.0% (-30.0 to -30.0)"
    assert row_of(table, "graph", "vllm")["time in exchange"] == "75.0%"


def test_parts_are_shares_and_steps_are_milliseconds(store):
    table = tables.parts_table(store, SCOPE)
    assert [row[0] for row in table.rows] == ["a step, ms", "exchange", "attention"]
    assert row_of(table, "a step, ms")["graph"] == "4.0" and row_of(table, "exchange")["graph"] == "75.0%"
    assert row_of(tables.outside_table(store, SCOPE), "experts")["graph"] == "0.50"


def test_replicas_are_shares_of_the_contiguous_time_and_of_the_step(store):
    row = tables.replica_table(store, SCOPE).rows[2]
    assert list(row) == ["even", *("-20.0% (-20.0 to -20.0)", "-10.0% (-10.0 to -10.0)") * 2]


def test_several_nodes_are_compared_with_experts_that_stay(store):
    table = tables.multihost_table(store, SCOPE)
    assert {row[0] for row in table.rows} == {"2", "8"} and len(table.rows) == 12
    assert row_of(table, "8", "gimbal")["TPOT, 0.5"] == "-50.0% (-50.0 to -50.0)"
    assert row_of(table, "2", "static")["TPOT, 0"] == "-" and row_of(table, "2", "static")["MB, 0"] == "1.00"
    row = row_of(run_table("multihost_runs", store), "8", "0.8", "gimbal")
    assert row["TTFT, change"] == "-50.0% (-50.0 to -50.0)" and row["share across nodes"] == "25.0%"


def test_every_table_is_full_and_has_the_same_columns_in_all_rows(store, tmp_path):
    found = all_tables(store, SCOPE)
    for table in found:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows), table.name
        assert table.rich().row_count == len(table.rows)
    assert len({table.name for table in found}) == len(found)
    all_tables(ResultStore(tmp_path / "empty.jsonl"), SCOPE)  # no results are no error


def test_markdown_names_the_command():
    table = Table("late", "Title", ["a", "b"], [["x", "1"]], "late")
    assert table.markdown() == "`python -m research.reproduce late`. Title\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_claims_are_worded_for_rows():
    assert all("|" not in worded(claim) for claim in CLAIMS)
