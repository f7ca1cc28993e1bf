# SPDX-License-Identifier: Apache-2.0
"""What the first check says of the tenant's secret, which settings only point to."""

from __future__ import annotations

from pathlib import Path

from s3ec.doctor.run import settings
from tests.unit.doctor.conftest import MakePatient


def test_a_secret_that_is_absent_short_or_open_to_all_is_named_and_mended(
    make_patient: MakePatient, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    patient = make_patient(tenant_key=f"file:{path}")
    absent = settings(patient)
    assert (absent.verdict, str(path) in absent.found) == ("fail", True)
    assert "readable" in absent.mend
    path.write_bytes(b"short\n")
    short = settings(patient)
    assert (short.verdict, "5 bytes" in short.found) == ("fail", True)
    assert "openssl" in short.mend
    path.write_bytes(b"a secret that is long enough")
    path.chmod(0o644)
    assert settings(patient).verdict == "warn"
    assert "chmod 600" in settings(patient).mend
    path.chmod(0o600)
    assert settings(patient).verdict == "ok"
