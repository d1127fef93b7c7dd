"""Errors, hyperparameters, trees and branches: whatever is independent of PPO."""
