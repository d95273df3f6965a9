"""What the compiled CPU kernels serve, and how they are kept and shared among threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.graphs_for_tests import mixed
from weft.ops import cpu, spmm
from weft.ops.cpu import MOST_SHARES, WORK_OF_A_SHARE, count_shares, run_shares

ROOT = Path(__file__).parents[3]


def test_serves_one_type_of_float32_or_float64():
    single, double, half = torch.zeros(1), torch.zeros(1).double(), torch.zeros(1).half()
    assert cpu.serves(single)
    assert cpu.serves(double, None, double)
    assert not cpu.serves(half)
    assert not cpu.serves(single, double)
    assert not cpu.serves(torch.zeros(1, dtype=torch.int64))


def test_small_work_is_one_share_and_large_work_is_bounded():
    assert count_shares(0) == 1
    assert count_shares(WORK_OF_A_SHARE) == 1
    assert count_shares(2 * WORK_OF_A_SHARE) == 2
    assert count_shares(10**15) == MOST_SHARES


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_share_runs_once(threads):
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(threads)
        run_shares(lambda tag, share, shares: seen.append((tag, share, shares)), ("a",), 7)
    finally:
        torch.set_num_threads(before)
    assert sorted(seen) == [("a", share, 7) for share in range(7)]


def test_an_error_in_a_thread_arrives():
    def fail(share, shares):
        raise ValueError(f"share {share}")

    with pytest.raises(ValueError, match="share"):
        run_shares(fail, (), 8)


def test_calls_from_several_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    adj, x = mixed(), torch.randn(19, 40)
    expected = spmm(adj, x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: spmm(adj, x), range(40)))
    assert all(torch.equal(result, expected) for result in results)


def test_a_forked_process_has_threads_of_its_own():
    code = (
        "import os, torch; from weft.ops import cpu; torch.set_num_threads(2); seen = []\n"
        "work = lambda share, shares: seen.append(share)\n"
        "cpu.run_shares(work, (), 6)\n"
        "if os.fork() == 0:\n"
        "    cpu.run_shares(work, (), 6); os._exit(0 if len(seen) == 12 else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


def test_kernels_compile_where_nothing_can_be_written(monkeypatch):
    from numba.core.caching import CacheImpl, CompileResultCacheImpl

    from weft.ops.cpu.kernel import kernel

    for implementation in (CacheImpl, CompileResultCacheImpl):
        monkeypatch.setattr(implementation, "_locator_classes", [], raising=False)
    assert kernel(lambda x: x + 1)(1) == 2


def test_numba_is_not_imported_with_the_package():
    code = "import sys, weft.ops; raise SystemExit('numba' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == 0
