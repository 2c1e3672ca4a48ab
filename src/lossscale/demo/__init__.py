"""The experiment of `lossscale demo`: handwritten digits, learned in float32 and in float16."""
