"""The small model that `make serve` trains when no other model is named. Needs torch."""
