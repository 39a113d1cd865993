"""What is around the products of a mixture of experts: routing, permutation, combination."""
