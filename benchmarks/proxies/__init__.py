"""Small front ends for peers that have none of their own."""
