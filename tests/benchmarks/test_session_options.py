from asynccomm.benchmarks.session_options import SessionOptions


def test_the_options_travel_as_json() -> None:
    options = SessionOptions(ops=["reduce"], sizes=[8], backend="auto", peers=["torch"], rounds=3, out="/tmp/ä.json")
    assert SessionOptions.from_json(options.to_json()) == options
