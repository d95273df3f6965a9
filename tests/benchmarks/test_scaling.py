"""The model of many GPUs: its table has the rows of the document, for graphs that fit one device and for others."""

from __future__ import annotations

from benchmarks.suites import scaling


def test_rows():
    report, found = scaling.predict("arxiv", "GCN 2 x 16")
    assert report.fits
    assert [one.ranks for one in found] == [8, 64, 512]
    assert [one.link for one in found] == ["nvlink", "infiniband", "infiniband"]
    large = scaling.row("papers100m", "GIN 5 x 64")
    assert large[1].startswith("does not fit")
    assert all("x)" not in cell for cell in large[2:]), "nothing to compare with"


def test_the_command(capsys):
    scaling.main(["--shapes", "arxiv"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line]) == 4
    assert "512 GPUs" in lines[0]
