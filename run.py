from lvpcfg.jobs.main import main

main()
