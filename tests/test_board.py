"""What TensorBoard shows of a training: the events, and the pages in a browser."""

import pytest
from running import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lvpcfg import corpus, write_trees
from lvpcfg.estimate.training import SplitMergeOptions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    files = {name: str(folder / f"{name}.mrg") for name in ("train", "dev")}
    write_trees(corpus("train")[:30], files["train"])
    write_trees(corpus("dev")[:5], files["dev"])
    options = SplitMergeOptions(cycles=2, split_iterations=2, merge_iterations=2, smooth_iterations=1)
    result, _ = run("train", folder, **files, estimator=options)
    return folder, files, result


def test_what_the_log_of_a_training_holds(trained):
    tmp_path, files, result = trained
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = log.Tags()
    dev = {f"dev/{name}" for name in ("precision", "recall", "f1", "f1_all", "tagging_accuracy", "errors")}
    every = {"log_likelihood_per_word", "states", "rules", "seconds_per_iteration", "memory_mb"}
    assert set(tags["scalars"]) == dev | every | {"best/f1", "best/log_likelihood_per_word"}
    assert [event.step for event in log.Scalars("states")] == list(range(1, 11))
    assert [event.step for event in log.Scalars("dev/f1")] == [0, 5, 10]
    assert log.Scalars("dev/f1")[-1].value == pytest.approx(result["last_f1"], abs=0.01)
    assert log.Scalars("best/f1")[-1].value == pytest.approx(result["f1"], abs=0.01)
    assert log.Scalars("states")[-1].value == result["last_states"]
    assert log.Scalars("memory_mb")[0].value > 50
    parses = [tag for tag in tags["images"] if tag.startswith("parses/")]
    assert set(tags["images"]) == {"states", *parses}
    assert len(parses) == 3
    assert [image.step for image in log.Images(parses[0])] == [0, 5, 10]
    assert log.Images("states")[0].encoded_image_string.startswith(b"\x89PNG")
    assert b"seed: 0" in log.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    begin = HParamsPluginData.FromString(
        log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert begin.hparams["estimator.cycles"].number_value == 2
    assert begin.hparams["estimator.name"].string_value == "split_merge"
    assert begin.hparams["data.dev"].string_value == files["dev"]
    experiment = HParamsPluginData.FromString(
        log.summary_metadata["_hparams_/experiment"].plugin_data.content
    ).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["best/f1", "best/log_likelihood_per_word"]
