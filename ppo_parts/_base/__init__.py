"""Errors, hyperparameters, trees and batching: whatever is independent of PPO."""
