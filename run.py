from lvpcfg.command import main

if __name__ == "__main__":  # processes that parse import it too
    main()
