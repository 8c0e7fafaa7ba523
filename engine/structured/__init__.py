"""The one judge of structured output, which router and worker both call. Pure, without torch and xgrammar."""
