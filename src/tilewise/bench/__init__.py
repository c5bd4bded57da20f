"""``tilewise bench``: speed, memory and correctness of tilewise and its peers, as JSONL rows; plots and a report."""
