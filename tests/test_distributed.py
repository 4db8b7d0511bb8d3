"""Real processes under torchrun, over gloo: what two train is what one trains on the whole batch, and a fault of one ends both."""

import json
import time
from pathlib import Path

import pytest
import torch
from digit_folders import digit_files
from distributed_worker import CASES, LABELS, PAIRS, PARTLY, SCENES, VIT, assembled, evaluated, updated

from lab.base.errors import UserError
from lab.base.seeds import seed_of
from lab.data.loading import Shares

ROOT = Path(__file__).resolve().parents[1]
# losses of float32, summed in another order
LOSS = {"rtol": 1e-5, "atol": 1e-5}
# and weights after four steps at a learning rate of 1e-1
WEIGHT = {"rtol": 1e-4, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory, torchrun):
    """What both ranks kept of each case, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    digit_files(folder / "nine", 9, 3, ("a",))
    done = torchrun(ROOT / "tests/distributed_worker.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)] for name in CASES}
    return kept | {"folder": folder, "output": done.stdout}


def assert_same(one, other, **tolerance):
    """Trees of tensors, numbers and other values."""
    (leaves, tree), (others, same) = (torch.utils._pytree.tree_flatten(each) for each in (one, other))
    assert tree == same
    for value, wanted in zip(leaves, others, strict=True):
        if isinstance(value, (torch.Tensor, float)):
            torch.testing.assert_close(value, wanted, **tolerance)
        else:
            assert value == wanted


@pytest.fixture(scope="module")
def whole():
    """One process with the batches of both: with class weights, and 29 samples in the last one."""
    return updated(assembled(*VIT, "data.batch_size=64"))


@pytest.mark.parametrize("case", ["ddp", "accumulated", "fsdp", "fsdp accumulated", "fused ddp", "fused fsdp"])
def test_two_processes_train_as_one_with_the_whole_batch(results, whole, case):
    one, other = results[case]
    assert_same(one["windows"], other["windows"], **EXACT)
    assert one["updates"] == whole["updates"] == 23
    assert bool(one["spread"]) == ("fsdp" in case)
    assert_same(one["windows"], whole["windows"], **LOSS)
    assert whole["windows"][:, -1].tolist() == [64, 64, 64, 29]
    for part in ("model", "optimizer"):
        assert_same(one[part], whole[part], **WEIGHT)


@pytest.mark.parametrize("case", ["frozen ddp", "frozen fsdp"])
def test_two_processes_train_a_part_of_a_model_as_one(results, case):
    trainer = assembled(*VIT, *PARTLY, "data.batch_size=64")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    alone = updated(trainer)
    one, other = results[case]
    assert_same(one["windows"], other["windows"], **EXACT)
    assert_same(one["windows"], alone["windows"], **LOSS)
    assert_same(one["model"], alone["model"], **WEIGHT)
    same = {name for name, value in one["model"].items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith(("blocks.0.", "patch_embed."))}


@pytest.mark.parametrize("case", ["evaluated", "evaluated fsdp"])
def test_each_held_out_sample_counts_once_over_ranks(results, case):
    alone = evaluated(assembled(*VIT))
    one, other = results[case]
    assert one == other
    assert one["values"]["samples"] == 360
    assert one["confusion"] == alone["confusion"]
    assert one["values"] == pytest.approx(alone["values"], abs=1e-6)


def test_detection_counts_positives_and_images_over_ranks(results):
    root = f"data.root={results['folder']}"
    # seven images: of two batches the second would leave a rank one image, so that both ranks share out one
    alone = updated(assembled(*SCENES, root, "data.batch_size=7"), first=1)
    one, other = results["scenes"]
    assert_same(one["windows"], other["windows"], **EXACT)
    assert alone["windows"][:, -1].tolist() == [7, 7]
    assert alone["windows"][:, -2].min() > 0
    assert_same(one["windows"], alone["windows"], rtol=1e-4, atol=1e-5)
    assert_same(one["model"], alone["model"], **WEIGHT)
    whole = evaluated(assembled(*SCENES, root))["values"]
    for values in (each["values"] for each in results["evaluated scenes"]):
        assert values["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert values == pytest.approx(whole, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(("case", "samples"), [("labels", 9), ("pairs", 37)])
def test_other_tasks_count_over_ranks(results, case, samples):
    words = {"labels": [*LABELS, f"data.root={results['folder']}/labels"], "pairs": PAIRS}[case]
    alone = evaluated(assembled(*words))["values"]
    one, other = results[f"evaluated {case}"]
    assert one == other
    assert one["values"]["samples"] == samples
    assert one["values"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("case", ["bad ddp", "bad fsdp"])
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(results, case):
    for each in results[case]:
        assert each["bad"] == 1
        assert each["evidence"]["update"] == 1
        assert each["evidence"]["images"][0].isnan().all()
    before, after = results[case][0]["before"], results[case][0]["after"]
    assert_same(after, before, **EXACT)
    if case == "bad ddp":
        assert_same(results[case][1]["after"], after, **EXACT)


def test_running_statistics_are_averaged_over_ranks(results):
    one, other = results["statistics"]
    assert not torch.equal(one["own"], other["own"])
    assert_same(one["averaged"], (one["own"] + other["own"]) / 2, **EXACT)
    assert_same(other["averaged"], one["averaged"], **EXACT)
    assert one["values"] == other["values"]


@pytest.mark.parametrize("case", ["continued", "continued fsdp"])
def test_all_ranks_stop_when_one_is_asked_to_and_go_on_as_if_they_had_not(results, case):
    one, other = results[case]
    assert one["stopped at"] == other["stopped at"] == 3
    for each in (one, other) if case == "continued" else (one,):
        assert_same(each["resumed"], each["straight"], **EXACT)
    assert "DTensor" not in one["kinds"]
    (first, second), others = one["tested"], other["tested"]
    assert first == second == others[0] == others[1]
    assert first["test/samples"] == 180


def test_a_checkpoint_of_shards_is_a_whole_models(results):
    """One process loads and scores it; it does not go on with it, as its batches would be others."""

    state = torch.load(results["continued fsdp"][0]["path"], weights_only=True)
    trainer = assembled("model=tiny_vit", "trainer.device=cpu", "data.test=0.1")
    trainer.model.load_state_dict(state["model"])
    trainer.updater.load_state(state)
    assert_same(trainer.model.state_dict(), results["continued fsdp"][0]["straight"]["model"], **EXACT)
    assert evaluated(trainer)["values"] == pytest.approx(state["best"]["values"], abs=1e-6)
    with pytest.raises(UserError, match=r"run was one of 2 processes.*this is one of 1"):
        trainer.restore(state)


def test_two_ranks_are_one_run_of_the_store(results):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{results['folder']}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/samples"] == 360
    assert run.data.tags["processes"] == "2"
    assert 0 <= run.data.metrics["train/data_wait_share"] < 1
    assert len(client.get_metric_history(run.info.run_id, "val/top1")) == 1


def test_only_the_first_rank_writes_and_speaks(results):
    (folder,) = (results["folder"] / "run").iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in records].count("start") == 1
    assert records[-1]["status"] == "FINISHED"
    for line in ("an update has 256", "held-out top-1 ", "finished"):
        assert results["output"].count(line) == (2 if "top-1" in line else 1), results["output"]


def folder_words(root):
    words = [f"data.root={root}", "data=folder", "data.image_size=32", "data.batch_size=4", "data.workers=0"]
    return [*words, "trainer.device=cpu", "tracking=none", f"trainer.runs={root}/runs"]


def test_a_fault_of_one_process_ends_the_run(tmp_path, torchrun):
    """An image that is damaged within, in the second rank's part of the first batch."""
    files = sorted((digit_files(tmp_path, 8, 8, ("a", "b")) / "train").rglob("*.png"))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed_of(0, 1)))
    damaged = files[Shares(16, 4, (1, 2)).of(order)[0][0]]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:60] + bytes(20) + whole[80:])
    done = torchrun("experiments/train.py", *folder_words(tmp_path), "model=tiny_vit")
    assert done.returncode == 1
    assert done.stderr.count(f"rank 1: error: {damaged}: cannot be read as an image") == 1, done.stderr
    assert f"error: rank 1: UserError: {damaged}: cannot be read as an image" in done.stderr
    assert "rank 1: Traceback" not in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["status"] == "FAILED"
    assert any("rank 1: UserError" in r["values"].get("error", "") for r in records if r["kind"] == "tags")


def test_a_fault_of_the_data_is_said_once(tmp_path, torchrun):
    """All processes come to it, the first one alone speaks, and none leaves the others behind in a barrier."""
    root = digit_files(tmp_path, 4, 4, ("a",))
    (root / "val" / "a" / "0.png").write_bytes(b"no picture")
    done = torchrun("experiments/train.py", *folder_words(root))
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1, done.stderr
    assert f"{root}: 1 corrupt entries; data.skip_corrupt=true leaves them out.\nval/a/0.png: cannot be read" in done.stderr
    assert "[rank" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_rest_of_one_sample_trains_under_batch_norm(results):
    """Nine images and a whole batch of eight: five and four, of which no process has but one."""
    one, other = results["rest"]
    assert one["updates"] == other["updates"] == 2
    assert one["windows"][:, -1].tolist() == [5, 4, 4]  # both updates, and the last again
    assert_same(one["windows"], other["windows"], **EXACT)
    assert one["windows"].isfinite().all()
    assert one["values"] == other["values"]
    assert one["values"]["samples"] == 3


@pytest.mark.slow
def test_two_processes_go_on_with_the_run_of_a_folder(tmp_path, torchrun):
    """The run has two epochs of nine images, five and four, before it goes on with a third."""

    def updates_of(folder):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["status"] == "FINISHED"
        return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["updates"]

    root = digit_files(tmp_path, 9, 3, ("a",))
    words = [*folder_words(root), "model=tiny_resnet", "trainer.parallel=fsdp", "optim=sgd", "trainer.max_updates=4"]
    done = torchrun("experiments/train.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert updates_of(folder) == 4
    done = torchrun("experiments/train.py", f"resume={folder}", "trainer.max_updates=6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after update 4 of 6" in done.stdout
    assert updates_of(folder) == 6


KILLED = """
import os, signal
from lab.training.trainer import Trainer
update = Trainer.update
def killed(self, group):
    if self.done == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, group)
Trainer.update = killed
"""


def test_a_process_that_was_killed_is_named(tmp_path, torchrun):
    """The other one only sees a connection that broke off, which is not what a person has to know."""
    (tmp_path / "loss.py").write_text((ROOT / "examples" / "my_loss.py").read_text() + KILLED)
    words = ["model=tiny_vit", "data.image_size=32", "trainer.device=cpu", "tracking=none", f"trainer.runs={tmp_path}/runs"]
    done = torchrun("experiments/train.py", *words, "loss=custom", f"loss.target={tmp_path}/loss.py:margin_bce")
    assert done.returncode == 1
    assert "error: rank 1 was killed: its process ended without a word" in done.stderr, done.stderr
    assert "Connection closed" not in done.stderr
    assert "rank 0: Traceback" not in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["status"] == "FAILED"
    assert any("rank 1 was killed" in r["values"].get("error", "") for r in records if r["kind"] == "tags")


@pytest.mark.parametrize(
    ("samples", "batch_size", "ranks"),
    [(37, 4, 3), (24, 4, 3), (26, 4, 3), (25, 4, 3), (2, 4, 2), (7, 4, 2), (10, 3, 1), (29, 4, 3), (41, 8, 2), (9, 2, 1), (5, 4, 1)],
)
def test_every_sample_is_in_one_batch_of_one_rank(samples, batch_size, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    parts = [Shares(samples, batch_size, (rank, ranks)).of(order) for rank in range(ranks)]
    assert len({len(batches) for batches in parts}) == 1
    sizes = [[len(batch) for batch in together] for together in zip(*parts, strict=True)]
    assert all(min(together) >= 1 and max(together) - min(together) <= 1 for together in sizes)
    assert all(together == [batch_size] * ranks for together in sizes[:-2])
    assert max(map(max, sizes)) <= batch_size + 1
    assert min(map(min, sizes)) >= min(2, samples // ranks, batch_size)
    # batch by batch the samples are those of one process
    seen = torch.cat([torch.cat(together) for together in zip(*parts, strict=True)])
    assert sorted(seen.tolist()) == list(range(samples))
    assert set(seen[: sum(sizes[0])].tolist()) == set(order[: sum(sizes[0])].tolist())


@pytest.mark.parametrize(
    ("samples", "batch_size", "ranks", "sizes"),
    [
        (65, 64, 1, [33, 32]),
        (66, 64, 1, [64, 2]),
        (4, 3, 1, [2, 2]),
        (3, 2, 1, [3]),
        (1, 4, 1, [1]),
        (3, 1, 1, [1, 1, 1]),
        (131, 64, 2, [66, 65]),
        (132, 64, 2, [128, 4]),
        (11, 4, 2, [6, 5]),
        (7, 2, 2, [7]),
    ],
)
def test_no_batch_has_one_sample_where_two_can_be_had(samples, batch_size, ranks, sizes):
    assert Shares(samples, batch_size, (0, ranks)).sizes == sizes


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(UserError, match="3 samples cannot be shared out among 4 processes"):
        Shares(3, 8, (0, 4))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("cuda:0", r"takes the GPU of its own number"), ("auto", r"started 4 processes on this host, which has 2 GPUs.*--nproc-per-node 2")],
)
def test_each_process_needs_a_gpu_of_its_own(monkeypatch, wanted, message):
    from lab.run.machine import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"(?s){message}"):
        pick_device(wanted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert pick_device("auto") == torch.device("cuda", 1)


def test_apps_of_one_process_refuse_torchrun(monkeypatch, capsys):
    import evaluate
    import train

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate.main(["checkpoint=x"]) == 1
    assert "experiments/evaluate.py runs in one process; torchrun started 2" in capsys.readouterr().err
    assert train.main(["-m", "seed=0,1"]) == 1
    assert "--multirun runs in one process" in capsys.readouterr().err


def test_a_process_that_waits_in_vain_is_ended(tmp_path, torchrun):
    began = time.monotonic()
    done = torchrun(ROOT / "tests/waiting_worker.py", tmp_path / "ended")
    assert done.returncode == 1
    assert time.monotonic() - began < 250
    assert (tmp_path / "ended").read_text() == "rank 1: ValueError: the second one's fault"
    assert done.stderr.count("ValueError: the second one's fault\n") == 1
    assert "rank 1: Traceback" in done.stderr
