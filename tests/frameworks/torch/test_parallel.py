"""Pipelines, experts, tensor parallel: the page's programs, and every order of calls."""

import pytest
import torch

from frameworks.torch import cases_of_parallel as cases


def test_a_pipeline_of_two_optimizers_is_bit_equal_to_one_process_and_resumed_on_fewer(found):
    [(numbers, loaded, plain)] = [process["pipeline_on_one"] for process in found[1]]
    assert loaded == plain
    assert numbers == [2.0**14, 1, 7]
    for size, case in ((4, "pipeline"), (2, "pipeline_resumed")):
        parts = [process[case] for process in found[size]]
        assert [part[0] for part in parts] == [[2.0**14, 1, 7]] * size
        # The processes of one stage have the same, and the stages together the whole model.
        assert {name: value for part in parts for name, value in part[1].items()} == plain
        assert all(part[1].items() <= plain.items() for part in parts)


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("tensor_parallel", cases.plain_tensor_parallel),
        ("experts", cases.plain_experts),
    ],
)
def test_a_sharded_model_goes_the_way_of_a_plain_one_and_skips_together(found, case, plain):
    for process in found[4]:
        skipped, then, values = process[case]
        assert skipped == [2.0**14, 1, 5]
        assert then == [2.0**14, 1, 6]
        for value, parameter in zip(values.values(), plain(), strict=True):
            torch.testing.assert_close(torch.tensor(value), parameter.detach())


def test_a_norm_counts_each_number_once_whatever_groups_are_given(found):
    for process in found[4]:
        assert process["norms"] == pytest.approx([1.0] * 5)


def test_recipes_of_two_processes_print_what_they_show(found):
    for process in found[2]:
        for [expected], printed in process["recipes"]:
            # One of two stages has a loss to speak of.
            assert printed.split() in ([], expected.split())
    assert [printed != "" for _, printed in found[2][1]["recipes"]] == [True, True]


@pytest.mark.parametrize("case", ["orders", "orders_of_scalers"])
def test_in_any_order_of_calls_two_processes_do_the_same(found, case):
    processes = [process[case] for process in found[2]]
    assert len(processes[0]) >= 72
    for name in processes[0]:
        scaled_on, overflow_on, lacking = name.partition(") ")[2].split()[:3]
        lacking = None if lacking == "None" else int(lacking)
        place = cases.OVERFLOW_ON[overflow_on]
        skipped = place is not None and place != lacking
        scale = 4.0 if skipped and scaled_on != "none" else 8.0
        for rank, process in enumerate(processes):
            applied = not skipped and rank != lacking
            assert process[name] == [scale, int(skipped), [-1.0 * applied] * 2], (name, rank)
