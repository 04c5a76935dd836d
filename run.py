from lvpcfg_command import main

main()
