"""What comes from outside is checked here, and folders are swapped whole: nothing is believed or half written.

A stranger's program (a chat template, an unusual tokenizer) runs in a process apart.
"""
