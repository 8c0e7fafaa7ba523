"""The prefill leg's own decisions: who may read which sealed blocks, and until when."""
