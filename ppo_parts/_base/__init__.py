"""Errors, hyperparameters, trees and batching, which are independent of PPO."""
