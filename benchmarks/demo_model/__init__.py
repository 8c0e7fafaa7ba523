"""The small model that `make serve` trains if no other model is named. Needs torch."""
