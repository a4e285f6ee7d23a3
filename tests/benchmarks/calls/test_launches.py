"""Whose kernel a launch is."""

from __future__ import annotations

import pytest

from benchmarks import launches


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("k12", "tilewright"),
        ("kernel", "other"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", "cudnn"),
        ("nvjet_sm90_hsh_64x8_64x16_2x4_h_bz_TNT", "cublas"),
        ("void at::native::elementwise_kernel<128, 4>", "torch"),
        ("triton_poi_fused_0", "inductor"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
    ],
)
def test_a_class(name: str, kind: str) -> None:
    assert launches.class_of(name) == kind


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--device", "cpu"]) == 2
    assert "those of a GPU" in capsys.readouterr().err


def test_a_network_that_is_not_there() -> None:
    with pytest.raises(SystemExit):
        launches.main(["--only", "nothing"])
