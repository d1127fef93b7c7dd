"""Errors, hyperparameters, trees and branches: what knows nothing of PPO."""
