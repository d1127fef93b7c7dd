"""The core of the library: batches, parts, chains, and the learner that runs them."""
