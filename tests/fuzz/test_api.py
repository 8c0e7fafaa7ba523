"""A short run of the API fuzzer, with the same cases each time."""

from tests.fuzz.api import RIGHT, checks, router

PATHS = {
    *RIGHT,
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
}


def test_no_answer_is_a_defect_or_undocumented():
    with router() as url:
        found = dict(checks(url, cases=20, is_random=False))
    assert {what: failure for what, failure in found.items() if failure is not None} == {}
    assert {f"{kind} POST {path}" for kind in ("positive", "negative") for path in PATHS} < found.keys()
    assert {f"right {path}" for path in RIGHT} < found.keys()
