"""Parts of the scheduler, pure like it: what a sequence is, and the policies that choose among them."""
