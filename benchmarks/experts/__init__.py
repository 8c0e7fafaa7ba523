"""Expert placement beside its baseline, on several kinds of counts."""
