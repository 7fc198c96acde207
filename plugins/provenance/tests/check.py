"""Check what Modelyard wrote by the libraries of others; runs in their environment.

`python check.py dsse BUNDLE KEY` · `python check.py spdx FILE`
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any


def check_dsse(bundle: Path, key: Path) -> None:
    """Verify the envelope by securesystemslib, and read the statement by in-toto's attestation."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    envelope: Any = json.loads(bundle.read_bytes())["dsseEnvelope"]
    public = SSlibKey.from_crypto(load_pem_public_key(key.read_bytes()))
    envelope["signatures"] = [{**each, "keyid": public.keyid} for each in envelope["signatures"]]
    Envelope.from_dict(envelope).verify([public], 1)
    message = ParseDict(json.loads(base64.b64decode(envelope["payload"])), Message())
    Statement.copy_from_pb(message).validate()


def check_spdx(file: Path) -> None:
    """Read the document by SPDX's own bindings, which know every type, key and cardinality."""
    from spdx_python_model import v3_0_1 as model

    objects = model.SHACLObjectSet()
    with file.open("rb") as opened:
        model.JSONLDDeserializer().read(opened, objects)
    if objects.missing_ids:
        raise ValueError(f"elements are named and not there: {objects.missing_ids}")
    packages = list(objects.foreach_type("ai_AIPackage"))
    names = sorted(each.name for each in packages)
    profiles = next(iter(objects.foreach_type("SpdxDocument"))).profileConformance
    print(json.dumps({"models": names, "profiles": list(profiles)}))  # noqa: T201


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[2:]]
    if sys.argv[1] == "dsse":
        check_dsse(*given)
    else:
        check_spdx(*given)
