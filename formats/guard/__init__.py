"""What comes from outside is checked here, and folders are swapped whole: nothing is believed or half written."""
