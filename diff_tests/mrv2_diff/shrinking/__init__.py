"""Makes a failing case short: less of it, as long as it fails in the same way.

`cuts` says what may be left out, `search` tries it, `signature` says what the same way is, `texts`
tells the result; `session` runs the tries on engines. Only the last needs torch and vLLM.
"""
