"""Figures for people: three digits and a unit."""


def seconds(value_s: float | None) -> str:
    """Seconds as `1.43 s`, `85.2 ms`, `310 µs`."""
    if value_s is None:
        return "-"
    size = abs(value_s)
    if size < 0.5e-6:
        return "0 s"  # no clock here resolves less
    if size >= 0.9995:
        return f"{three_digits(value_s)} s"
    if size >= 0.9995e-3:
        return f"{three_digits(value_s * 1e3)} ms"
    return f"{three_digits(value_s * 1e6)} µs"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def per_second(value: float | None) -> str:
    return "-" if value is None else f"{three_digits(value)} /s"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio, such as `1.50x`."""
    return "-" if value is None else f"{three_digits(value)}x"


def three_digits(value: float) -> str:
    """Three significant digits, with an exponent only below 0.0001."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0995 else f"{value:.3g}"


def tick_seconds(value_s: float) -> str:
    """Labels of axes, such as `1 s`, `50 ms`."""
    if value_s == 0 or value_s >= 1:
        return f"{value_s:g} s"
    return f"{value_s * 1e3:g} ms" if value_s >= 1e-3 else f"{value_s * 1e6:g} µs"
