"""DDP, FSDP2 and DTensor on two processes, with and without `install()`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("convgrad._native")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_agree_with_torch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_processes.py")
    jobs = [subprocess.Popen([sys.executable, str(script), str(tmp_path / "meeting"), str(rank)],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        answers = [job.communicate(timeout=180) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], answers
    for out, _ in answers:
        assert [line.split()[0] for line in out.splitlines() if line[0].islower()] == \
            ["replicated", "fully_sharded", "batch_of_a_dtensor"]
