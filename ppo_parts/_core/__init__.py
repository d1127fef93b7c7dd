"""The contract: batches, parts, chains, and the learner that runs them."""
