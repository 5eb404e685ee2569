"""Stochastic gradient descent by processes of one host on arrays that they share."""
