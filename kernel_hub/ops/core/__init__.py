"""What ops of any kind need, each thing once. Knows no op."""
