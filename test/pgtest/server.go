package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/child"
)

// URLVariable names the environment variable with the administrator's URL of a
// server to share.
const URLVariable = "JOIN_TEST_POSTGRES"

// Server is a Postgres server of the test's own: it may be stopped, killed and
// paused without harm to other tests.
type Server struct {
	url  *url.URL
	dir  string
	port int
	user *syscall.Credential
	bin  string
	// durable servers keep fsync on, for tests that kill them and then look at what
	// was committed.
	durable bool
	process *child.Process
}

// NewServer starts a server that lives as long as the test. It keeps what was
// committed when it is killed.
func NewServer(tb testing.TB) *Server {
	tb.Helper()
	s, err := startServer(true)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = s.process.Signal(syscall.SIGCONT)
		s.process.Stop()
		if err := child.RemoveDir(s.dir); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Stop ends the server as a service manager does (fast shutdown: connections are
// broken off).
func (s *Server) Stop() {
	_ = s.process.Signal(syscall.SIGINT)
	<-s.process.Done()
}

// Kill ends the server as a crash does.
func (s *Server) Kill() {
	_ = s.process.Signal(syscall.SIGQUIT)
	<-s.process.Done()
}

// Start starts it again after Stop or Kill, at the same address, and returns when
// it answers.
func (s *Server) Start(tb testing.TB) {
	tb.Helper()
	if err := s.start(); err != nil {
		tb.Fatal(err)
	}
}

// URL is the administrator's, for the database "postgres".
func (s *Server) URL() string { return s.url.String() }

// shared is the server of the whole test binary.
var shared = sync.OnceValues(func() (*url.URL, error) {
	if u := os.Getenv(URLVariable); u != "" {
		return url.Parse(u)
	}
	s, err := startServer(false)
	if err != nil {
		return nil, err
	}
	return s.url, nil
})

// StartShared starts a server for a program that runs several test binaries, and
// returns what to put into JOIN_TEST_POSTGRES. It ends with this process.
func StartShared() (string, error) {
	s, err := startServer(false)
	if err != nil {
		return "", err
	}
	return s.url.String(), nil
}

func startServer(durable bool) (*Server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, durable: durable}
	if os.Geteuid() == 0 {
		if s.user, err = unprivileged(); err != nil {
			return nil, err
		}
	}
	if s.dir, err = child.TempDir("join-pgtest-", s.user); err != nil {
		return nil, err
	}
	password := rand.Text()
	if err := s.initialize(password); err != nil {
		return nil, err
	}
	// A port that looked free may be taken before it is used.
	for range 3 {
		var ports []int
		if ports, err = controlplane.FreePorts(1); err != nil {
			return nil, err
		}
		s.port = ports[0]
		s.url = &url.URL{
			Scheme: "postgres", User: url.UserPassword("postgres", password),
			Host: "127.0.0.1:" + strconv.Itoa(s.port), Path: "/postgres", RawQuery: "sslmode=disable",
		}
		if err = s.start(); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func (s *Server) initialize(password string) error {
	pwfile := filepath.Join(s.dir, "password")
	if err := os.WriteFile(pwfile, []byte(password+"\n"), 0o600); err != nil {
		return err
	}
	if s.user != nil {
		if err := os.Chown(pwfile, int(s.user.Uid), int(s.user.Gid)); err != nil {
			return err
		}
	}
	cmd := exec.Command(filepath.Join(s.bin, "initdb"), "--pgdata", filepath.Join(s.dir, "data"), "--username=postgres",
		"--pwfile", pwfile, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.user}
	cmd.Dir = s.dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	return os.Remove(pwfile)
}

func (s *Server) start() error {
	fsync := "off"
	if s.durable {
		fsync = "on"
	}
	args := []string{"-D", filepath.Join(s.dir, "data"), "-h", "127.0.0.1", "-p", strconv.Itoa(s.port), "-k", s.dir}
	for _, setting := range []string{
		"fsync=" + fsync, "full_page_writes=" + fsync,
		"max_connections=400", "shared_buffers=128MB", "timezone=UTC", "lc_messages=C",
		// A template is copied for every test; checkpoints would only slow that down.
		"checkpoint_timeout=1h", "max_wal_size=4GB",
	} {
		args = append(args, "-c", setting)
	}
	var err error
	s.process, err = child.Start(child.Command{
		Path: filepath.Join(s.bin, "postgres"), Args: args, Log: filepath.Join(s.dir, "log"), Credential: s.user,
		Stop: "QUIT", // immediate: nobody wants the data
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return s.process.Await(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, s.url.String())
		if err != nil {
			return err
		}
		return conn.Close(ctx)
	})
}

// binaries is the folder with the newest installed server: Debian keeps them out
// of PATH.
func binaries() (string, error) {
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return "", err
	}
	dirs = slices.DeleteFunc(dirs, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, "initdb"))
		return err != nil
	})
	if len(dirs) > 0 {
		return slices.MaxFunc(dirs, func(a, b string) int { return major(a) - major(b) }), nil
	}
	path, err := exec.LookPath("initdb")
	if err != nil {
		return "", errors.New(`no Postgres server is installed: run "make tools"`)
	}
	return filepath.Dir(path), nil
}

func major(bin string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	return n
}

// unprivileged is the user to run a server as, since Postgres refuses to be root.
func unprivileged() (*syscall.Credential, error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("the server Postgres does not run as root, and there is no user postgres or nobody to run it as")
}
