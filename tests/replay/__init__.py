"""What the compiler decides and prints for many programs, as text: to see what a change of the code touches.

    python -m tests.replay record FOLDER        python -m tests.replay compare BEFORE AFTER

A change that only moves code leaves every byte as it is.
"""
