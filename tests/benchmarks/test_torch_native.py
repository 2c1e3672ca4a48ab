"""The benchmark of PyTorch itself: that every way runs, and what it writes."""

import json

import pytest
import torch

from benchmarks import torch_native


def test_every_way_makes_a_step_and_is_compared(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{torch_native.BEGIN}\nold\n{torch_native.END}\nafter\n")
    output = tmp_path / "new" / "torch.json"
    threads = torch.get_num_threads()
    arguments = ["--quick", "--rounds", "1", "--output", str(output), "--page", str(page)]
    assert torch_native.main(arguments) == 0
    assert torch.get_num_threads() == threads
    results = json.loads(output.read_text())
    assert list(results) == list(torch_native.rows())
    assert set(results["fused, 10M in 100"]) == set(torch_native.METHODS)
    assert "device" not in results["foreach, 200 x 1000"]
    for found in results.values():
        for name in ("bare", "bare, clip"):
            assert found[name]["ratio"]["median"] == 1.0
        assert all(result["seconds"]["median"] > 0 for result in found.values())
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert capsys.readouterr().out.strip() in text


def test_the_ways_come_to_the_same_gradients():
    programs = torch_native.alone("fused", "200 x 1000", quick=True)
    gradients = []
    for program in programs.values():
        program.prepare()
        program.step()
        gradients.append([p.grad.clone() for p in program._parameters])
    names = list(programs)
    for name, found in zip(names, gradients, strict=True):
        # torch.amp.GradScaler leaves those that a fused optimizer divides as that leaves them.
        expected = gradients[names.index("bare, clip" if name.endswith("clip") else "bare")]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_a_row_that_is_not_there_is_an_error(capsys):
    with pytest.raises(SystemExit):
        torch_native.main(["--rows", "fast"])
    assert "there is no row 'fast'" in capsys.readouterr().err
