"""Runs end to end: what they print, what they leave, and that the referee agrees."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from commandline import SIZES, assert_same_bits, frontier, is_complete, judge, manifest_of, output_of, run, small_case
from safetensors.numpy import load_file, save_file

import frontier as package
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.spans import Span
from frontier.stream.trace import VERBS


def seeded_rows(**changes: object) -> np.ndarray:
    import torch

    case = small_case(**changes)
    rows_BSD = torch.empty(case.batch_size, case.seq_len, case.d_model)
    source = SeededSource(case, 2)
    source.read(Span(0, case.batch_size), rows_BSD)
    source.close()
    return rows_BSD.numpy()


def row_hash(row_SD: np.ndarray) -> str:
    """The contract's own words, section 6."""
    blocks = [row_SD[begin : begin + 4096] for begin in range(0, len(row_SD), 4096)]
    digests = [hashlib.sha256(np.ascontiguousarray(block, "<f4").tobytes()).digest() for block in blocks]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def test_a_run_leaves_manifest_weights_watched_rows_and_record(folder: Path) -> None:
    done = run()
    assert done.stdout.splitlines()[-1] == "run dir   kept"
    assert {path.name for path in Path("kept").iterdir()} == {
        "manifest.json", "weights.safetensors", "watched", "record.json",
    }  # fmt: skip
    manifest = manifest_of()
    assert manifest["schema"] == 1 and manifest["complete"] is True
    assert {key: manifest["case"][key] for key in SIZES} == SIZES
    assert manifest["input"] == {"kind": "seeded"} and manifest["mask"] is None
    digest = hashlib.sha256(Path("kept/weights.safetensors").read_bytes()).hexdigest()
    assert manifest["weights"] == {"kind": "seeded", "sha256": digest}
    assert [entry["row"] for entry in manifest["watched"]] == [0, 4]
    rows_BSD = seeded_rows()
    for entry in manifest["watched"]:
        row_SD = np.load(Path("kept") / entry["output"])
        assert row_SD.shape == (150, 64) and row_SD.dtype == np.dtype("<f4")
        assert entry["output_sha256"] == row_hash(row_SD)
        assert entry["input_sha256"] == row_hash(rows_BSD[entry["row"]])


def test_the_record_says_what_was_run_and_plans_beside_peaks() -> None:
    run()
    record = json.loads(Path("kept/record.json").read_text())
    assert record["kind"] == "run" and record["recipe"] == "fp32/packed/flash" and record["output"] == "none"
    assert len(record["pass_s"]) == 1 and record["first_slice_s"] > 0
    assert set(record["busy_s"]) == set(VERBS)
    assert record["host_planned_bytes"] > 0 and record["host_peak_bytes"] > 0
    assert record["plan"]["num_slices"] == 3
    assert record["versions"]["torch"] and record["source_sha256"]


def test_the_referee_passes_a_run_and_leaves_its_verdict() -> None:
    run("--watch", "0,1,2,3,4")
    done = judge()
    assert done.exit_code == 0, done.output
    verdict = json.loads(Path("kept/verdict.json").read_text())
    assert verdict["verdict"] == "pass"
    assert [row["row"] for row in verdict["rows"]] == [0, 1, 2, 3, 4]
    assert verdict["total"]["elements"] == 5 * 150 * 64


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch_size": 1, "seq_len": 1},
        {"heads": 64},
        {"heads": 1},
        {"ffn_dim": 1},
        {"d_model": 1, "heads": 1, "ffn_dim": 1},
        {"d_model": 6, "heads": 2, "seq_len": 33},
        {"batch_size": 2, "seq_len": 4097, "d_model": 8, "heads": 2, "layers": 1},
        {"layers": 5, "seq_len": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_the_referee_passes_runs_of_odd_shapes(sizes: dict[str, int], causal: str) -> None:
    run(causal, **sizes)
    done = judge()
    assert done.exit_code == 0, done.output


def test_a_flipped_bit_in_a_watched_row_cannot_be_judged() -> None:
    run()
    path = Path("kept/watched/row_00000004.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
    done = judge()
    assert done.exit_code == 2, done.output
    assert "row_00000004.npy" in done.stderr and "hint: " in done.stderr


def test_a_wrong_row_with_a_true_hash_fails() -> None:
    run()
    manifest = manifest_of()
    entry = manifest["watched"][1]
    row_SD = np.load(Path("kept") / entry["output"])
    row_SD[77, 13] += 0.1
    np.save(Path("kept") / entry["output"], row_SD)
    entry["output_sha256"] = row_hash(row_SD)
    Path("kept/manifest.json").write_text(json.dumps(manifest))
    done = judge()
    assert done.exit_code == 1, done.output
    assert "row 4 position 77 channel 13" in done.stdout
    assert json.loads(Path("kept/verdict.json").read_text())["verdict"] == "fail"


def test_other_weights_than_those_that_ran_cannot_be_judged() -> None:
    run()
    weights = load_file("kept/weights.safetensors")
    weights["layers.1.ffn_in.weight"][3, 3] += 1
    save_file(weights, "kept/weights.safetensors")
    done = judge()
    assert done.exit_code == 2, done.output
    assert "weights.safetensors" in done.stderr


def test_another_seed_in_the_manifest_is_seen() -> None:
    run()
    manifest = manifest_of()
    manifest["case"]["seed"] = 99
    Path("kept/manifest.json").write_text(json.dumps(manifest))
    assert judge().exit_code == 2


def test_a_run_that_watched_nothing_cannot_be_judged() -> None:
    run("--watch", "none")
    assert is_complete() and manifest_of()["watched"] == []
    assert judge().exit_code == 2


def test_watched_rows_are_those_named_once_each() -> None:
    run("--watch", "3,1,3")
    assert [entry["row"] for entry in manifest_of()["watched"]] == [1, 3]


def test_json_is_one_line_on_stdout_and_talk_goes_to_stderr() -> None:
    done = run("--json")
    assert len(done.stdout.splitlines()) == 1
    record = json.loads(done.stdout)
    assert record == json.loads(Path("kept/record.json").read_text())
    assert "case 14 with" in done.stderr and "recipe fp32/packed/flash" in done.stderr


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_quiet_says_nothing_on_stderr(as_json: list[str]) -> None:
    done = run("--quiet", *as_json)
    assert done.stderr == "" and done.stdout


def test_an_output_file_holds_what_the_same_run_leaves_in_memory() -> None:
    run("--output", "y.npy", "--watch", "2")
    got_BSD = np.load("y.npy")
    assert not Path("y.npy.partial").exists()
    case = small_case()
    machine = package.Machine.detect("cpu")
    plan = package.plan(case, machine, package.choose(case, machine).recipe)
    sink = MemorySink(case)
    package.run(plan, sink=sink)
    assert_same_bits(got_BSD, sink.host_BSD.numpy())
    assert_same_bits(np.load("kept/watched/row_00000002.npy"), got_BSD[2])


def test_output_in_memory_is_recorded_as_such() -> None:
    assert json.loads(run("--output", "memory", "--json").stdout)["output"] == "memory"


@pytest.mark.parametrize(
    "words",
    [
        ["--resident"],
        ["--ring-depth", "1"],
        ["--ring-depth", "2"],
        ["--ring-depth", "3"],
        ["--ring-depth", "64"],
        ["--poison"],
        ["--poison", "--resident", "--ring-depth", "1"],
        ["--passes", "3"],
        ["--watch", "none"],
        ["--ceilings"],
    ],
    ids=" ".join,
)
def test_no_way_of_running_changes_a_bit(words: list[str]) -> None:
    assert_same_bits(output_of(*words, name="one"), output_of("--on-the-fly", name="other"))


def test_another_seed_or_scale_changes_the_output() -> None:
    plain_BSD = output_of(name="plain")
    assert not np.array_equal(output_of("--seed", "7", name="seed"), plain_BSD)
    assert not np.array_equal(output_of("--input-scale", "3", name="scale"), plain_BSD)
    assert judge("seed-kept").exit_code == judge("scale-kept").exit_code == 0


def test_rows_from_files_give_what_the_seed_gives() -> None:
    seeded_BSD = output_of(name="seeded")
    rows_BSD = seeded_rows()
    np.save("rows é.npy", rows_BSD)
    save_file({"x": rows_BSD}, "rows.safetensors")
    save_file({"a": rows_BSD, "b": rows_BSD * 2}, "two.safetensors")
    assert_same_bits(output_of("--input", "rows é.npy", name="npy"), seeded_BSD)
    assert_same_bits(output_of("--input", "rows é.npy", "--resident", name="resident"), seeded_BSD)
    assert_same_bits(output_of("--input", "rows.safetensors", name="st"), seeded_BSD)
    assert_same_bits(output_of("--input", "two.safetensors", "--input-tensor", "a", name="two"), seeded_BSD)
    for name in ("npy", "resident", "st", "two"):
        assert manifest_of(f"{name}-kept")["input"]["kind"] == "file"
        done = judge(f"{name}-kept")
        assert done.exit_code == 0, done.output


def test_half_precision_rows_are_widened() -> None:
    np.save("half.npy", seeded_rows().astype(np.float16))
    np.save("wide.npy", seeded_rows().astype(np.float16).astype(np.float32))
    assert_same_bits(output_of("--input", "half.npy", name="a"), output_of("--input", "wide.npy", name="b"))
    assert judge("a-kept").exit_code == 0


def test_saved_weights_give_what_their_seed_gave() -> None:
    seeded_BSD = output_of(name="seeded")
    words = ["--weights", "seeded-kept/weights.safetensors"]
    assert_same_bits(output_of(*words, name="file"), seeded_BSD)
    manifest = manifest_of("file-kept")
    assert manifest["weights"] == {"kind": "file", "sha256": manifest_of("seeded-kept")["weights"]["sha256"]}
    assert judge("file-kept").exit_code == 0


def test_passes_are_each_timed_and_ceilings_measured_beside() -> None:
    record = json.loads(run("--passes", "3", "--json").stdout)
    assert len(record["pass_s"]) == len(record["card_s"]) == len(record["road_s"]) == 3
    assert judge().exit_code == 0
    record = json.loads(run("--passes", "2", "--no-ceilings", "--json", run_dir="other").stdout)
    assert len(record["pass_s"]) == 2 and record["card_s"] == []


def test_a_trace_is_chromes_format_with_the_five_verbs() -> None:
    run("--trace", "t r.json", "--passes", "2", "--no-ceilings")
    events = json.loads(Path("t r.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == list(VERBS)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 5 * 3 * 2
    assert {e["name"].split()[0] for e in spans} == set(VERBS)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["pid"] == 0 for e in spans)
    assert {(e["args"]["start"], e["args"]["stop"]) for e in spans} == {(0, 2), (2, 4), (4, 5)}
    for rows in {e["name"].split()[1] for e in spans}:
        trip = sorted((e for e in spans if e["name"].endswith(f" {rows}")), key=lambda e: e["ts"])[:5]
        assert [e["name"].split()[0] for e in trip] == list(VERBS)


def test_a_trace_of_a_run_with_ceilings_is_of_its_passes_only() -> None:
    run("--trace", "t.json", "--passes", "2")
    spans = [e for e in json.loads(Path("t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 5 * 3 * 2


def test_the_reference_recipe_passes_the_referee() -> None:
    run("--recipe", "fp32/separate/dense")
    assert json.loads(Path("kept/record.json").read_text())["recipe"] == "fp32/separate/dense"
    assert judge().exit_code == 0


def test_a_case_of_ones_own_runs_from_its_path() -> None:
    lines = ['name = "mein größter"', *(f"{key} = {size}" for key, size in SIZES.items()), "causal = false"]
    Path("mine.toml").write_text("\n".join(lines))
    done = frontier("run", "--device", "cpu", "--case", "mine.toml", "--quiet")
    assert done.exit_code == 0, done.output
    (run_dir,) = Path("runs").iterdir()
    assert manifest_of(run_dir)["case"]["causal"] is False
    assert judge(run_dir).exit_code == 0
