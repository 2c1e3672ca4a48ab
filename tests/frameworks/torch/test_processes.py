"""Several processes take every decision alike; they run once for all tests."""

import pytest
import torch

from frameworks.torch import cases_of_processes as cases
from frameworks.torch.expected_stats import expected


def of_all(found, size, case):
    """What all processes of a set found in a case: the same."""
    first, *others = (process[case] for process in found[size])
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(("size", "case"), [(4, "ddp"), (4, "ddp_unused"), (2, "ddp")])
def test_ddp_agrees_by_itself_and_sends_nothing_more(found, size, case):
    outcome = of_all(found, size, case)
    trace = [[8.0, 1], [4.0, 0], [4.0, 1], [4.0, 2]]
    assert outcome["scaler"] == outcome["wrapper"] == outcome["torch"]
    assert outcome["scaler"][:3] == [trace, True, 0]


def test_a_guarded_model_forgets_a_skipped_step_on_every_process(found):
    for outcome in found[2]:
        assert len(outcome["guarded"]) == 5
        assert all(each == [True, 1] for each in outcome["guarded"].values())


def test_an_explained_step_sends_no_message(found):
    of_first, of_last = (outcome["explained"] for outcome in found[2])
    for kind in ("sum", "fsdp"):
        assert of_first[kind] == of_last[kind] == [True, ["unknown"]]
    assert of_last["ddp"] == [True, ["forward overflow"]]
    assert of_first["ddp"] == [True, ["unknown"]]


@pytest.mark.parametrize("size", [4, 2])
def test_fsdp_skips_together_with_one_number_sent_for_each_step(found, size):
    for processes in zip(*(process["fsdp"].items() for process in found[size]), strict=True):
        for _, (trace, finite, sent) in processes:
            assert [step[:2] for step in trace] == [[4.0, 0], [4.0, 1], [4.0, 2]]
            # In the skipped step nothing has changed.
            assert trace[0][2]
            assert finite
            assert sent == 3
        assert not any(trace[1][2] for _, (trace, _, _) in processes[:1])


def test_a_mesh_in_every_order_of_placements(found):
    by_case = [process["mesh_2x2"] for process in found[4]]
    assert len(by_case[0]) == 72
    disagree = {
        name: sum(len({process[case][name][0] for process in by_case}) > 1 for case in by_case[0])
        for name in ("torch", *cases.OURS)
    }
    # D5: PyTorch reduces over the mesh and placements of the first gradient.
    assert disagree == {"torch": 54, "scaler": 0, "wrapper": 0}
    for name in cases.OURS:
        assert {tuple(p[case][name]) for p in by_case for case in p} == {(4.0, 2)}


def test_gradients_that_are_parts_of_a_sum(found):
    outcome = of_all(found, 4, "partial")
    assert len(outcome) == 3 * 3
    for trace in outcome.values():
        # Skipped twice. Then the two parts of 2, divided by a scale of 2, are a gradient of 2.
        assert trace == [[4.0, []], [2.0, []], [2.0, [2.0] * 4], [2.0, [2.0] * 4]]


def test_a_rule_sees_the_sum_of_parts(found):
    outcome = of_all(found, 4, "seen_of_sums")
    assert len(outcome) == 6
    # The two parts of 16, divided by a scale of 8, are a gradient of 4.
    assert outcome == dict.fromkeys(outcome, expected([torch.full((4,), 4.0)], 8.0))


def test_a_rule_sees_on_a_mesh_what_it_sees_in_one_process(found):
    [of_one] = found[1]
    outcome = of_all(found, 4, "seen")
    good = cases.whole_gradients()
    for name, (trace, sent) in outcome.items():
        assert trace == of_one["seen"][name][0]
        assert of_one["seen"][name][1] == []
        numbers = 2 if name == "largest" else 4
        # Once for each of the two dimensions, in each step.
        assert sent == [numbers] * 2 * len(trace)
        largest, low, high, elements = expected(good, 8.0)
        counts = [0.0, 0.0, 0.0] if name == "largest" else [low, high, elements]
        assert trace[0] == [8.0, 1, [largest, *counts]]
    assert outcome["wrapper"][0] == outcome["device"][0] == outcome["scaler"][0]


def test_of_a_given_group_each_process_has_what_nobody_else_has(found):
    outcome = of_all(found, 4, "seen_by_hand")
    one = cases.whole_gradients()[0]
    every, but_the_last = ([one * (rank + 1) for rank in range(n)] for n in (4, 3))
    trace = [expected(every, 8.0), expected(but_the_last, 8.0)]
    assert outcome == {"scaler": trace, "wrapper": trace}


def test_a_step_whose_loss_nobody_scaled_is_skipped_by_all(found):
    outcome = of_all(found, 4, "as_given")
    assert len(outcome) == 6
    for name, trace in outcome.items():
        looked = [False, True] if "unscaled" in name else [None, None]
        assert trace == [[looked[0], True, *[1.0] * 4], [looked[1], False, *[0.5] * 4]]


def test_the_norm_on_a_mesh_is_that_of_one_process(found):
    of_one = found[1][0]["clipped"]
    outcome = of_all(found, 4, "clipped")
    assert outcome.keys() == of_one.keys()
    for name, trace in outcome.items():
        for ours, theirs in zip(trace, of_one[name], strict=True):
            assert ours[:3] == theirs[:3], name
            assert ours[3] == pytest.approx(theirs[3], rel=1e-5)
            # Without a gradient nothing is done; else all are clipped to a norm of 1.
            norm = sum(number**2 for number in ours[3]) ** 0.5
            assert not ours[3] or norm == pytest.approx(1.0, rel=1e-5)
        assert [step[2] for step in trace[:3]] == [False, False, True]
        # A step without any gradient moves nothing.
        assert trace[3][:2] == trace[2][:2] == [4.0, 0]
        if "device" not in name:
            assert trace[4][:3] == [4.0, 1, False]


def test_minimize_reaches_what_is_sharded(found):
    weights, gradients = of_all(found, 4, "minimized")
    assert weights == pytest.approx(found[1][0]["minimized"][0], rel=1e-4)
    # As on one process, `.grad` stays as it was.
    assert gradients == found[1][0]["minimized"][1] == []


@pytest.mark.parametrize("size", [4, 2])
def test_the_norm_of_a_sharded_model_is_that_of_one_process(found, size):
    of_one = found[1][0]["fsdp_clipped"]
    for name, numbers in of_all(found, size, "fsdp_clipped").items():
        assert numbers == pytest.approx(of_one[name], rel=1e-4, abs=1e-9)
        assert sum(number**2 for number in numbers) ** 0.5 == pytest.approx(0.05, rel=1e-5)


def test_a_given_group_agrees_also_where_a_process_has_no_gradient(found):
    outcome = of_all(found, 4, "shards_by_hand")
    assert len(outcome) == len(cases.OURS) * 2 * len(cases.OPTIMIZERS)
    for trace, finite in outcome.values():
        # One without a gradient among good ones; one overflows, others have none; nobody has any.
        assert trace == [[8.0, 1], [4.0, 0], [4.0, 0], [4.0, 1]]
        assert finite


def test_d4_the_sharded_scaler_with_a_fused_optimizer(found):
    theirs = [process["sharded_scaler"]["torch"] for process in found[4]]
    assert theirs == [[4.0, 0], [8.0, 1], [8.0, 1], [8.0, 1]]
    assert [process["sharded_scaler"]["ours"] for process in found[4]] == [[4.0, 0]] * 4


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit_and_is_loaded_by_one_process(found, kind):
    (trace, bits), (_, saved), resumed = of_all(found, 2, "whole_and_resumed")[kind]
    assert len({scale for scale, _ in trace}) > 1
    assert resumed == [trace[cases.SAVED :], bits]
    loaded, of_one, finite = found[1][0]["on_one"][kind]
    assert (loaded, of_one, finite) == (trace[cases.SAVED - 1], saved, True)


def test_processes_that_run_out_of_data_keep_one_scale(found):
    first, second = (process["uneven"] for process in found[2])
    assert first == second
    (shown, weights), (_, plain) = first
    assert [skipped for _, skipped in shown] == [1, 2]
    assert weights == plain
    # The lines of the page for PowerSGD skip one step.
    assert [process["compressed"] for process in found[2]] == [1, 1]


def test_a_wrapper_inside_of_zero_needs_a_group(found):
    for process in found[2]:
        refused, *counts = process["in_zero"]
        assert "Wrap the ZeroRedundancyOptimizer, or make the LossScaleOptimizer with" in refused
        assert counts == [2.0**14, 1]


def test_each_process_logs_its_own_records_and_names_the_overflows_of_its_shards(found):
    first, last = (process["monitored"]["each"] for process in found[2])
    for logged in (first, last):
        assert [record["scale"] for record in logged] == [8.0, 8.0, 4.0]
        assert [record["skipped"] for record in logged] == [False, True, False]
    assert [record["nonfinite"] for record in first] == [[], [], []]
    assert last[1]["nonfinite"] == [{"name": "0.weight", "infs": 1, "nans": 0}]
    # A monitor in one process alone exchanges nothing that the others would have to answer.
    alone, none = (process["monitored"]["first"] for process in found[2])
    assert (alone, none) == (first, [])
