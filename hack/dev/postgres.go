package main

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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/joinsvc/rows"
)

// capDACReadSearch lets Postgres's user reach its folder below one that is closed
// to it, such as root's home.
const capDACReadSearch = 2

// postgres is the database server: fsync on, passwords as in production.
func (s *system) postgres() (process, error) {
	bin, err := postgresBinaries()
	if err != nil {
		return process{}, err
	}
	attr, err := s.postgresUser()
	if err != nil {
		return process{}, err
	}
	args := []string{"-D", s.path("pgdata"), "-h", "127.0.0.1", "-p", strconv.Itoa(s.ports.Postgres), "-k", ""}
	for _, setting := range []string{"fsync=on", "max_connections=200", "shared_buffers=256MB", "max_wal_size=2GB", "timezone=UTC", "lc_messages=C"} {
		args = append(args, "-c", setting)
	}
	return process{
		name: "postgres", path: filepath.Join(bin, "postgres"), args: args, attr: attr, prepare: s.clearStaleLock,
		stop: syscall.SIGINT, // fast shutdown: does not wait for its clients to go
		ready: func(ctx context.Context) error {
			conn, err := pgx.Connect(ctx, s.adminURL("postgres"))
			if err != nil {
				return err
			}
			return conn.Close(ctx)
		},
	}, nil
}

func postgresBinaries() (string, error) {
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return "", err
	}
	best, newest := "", -1
	for _, dir := range dirs {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		if _, err := os.Stat(filepath.Join(dir, "initdb")); err == nil && n > newest {
			best, newest = dir, n
		}
	}
	if best == "" {
		return "", errors.New(`no Postgres server is installed: run "make tools"`)
	}
	return best, nil
}

// postgresUser is whom Postgres runs as: it refuses to be root.
func (s *system) postgresUser() (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	probe := exec.Command("/bin/ls", "-d", s.dir+"/.")
	probe.SysProcAttr = attr
	probe.Dir = "/"
	if probe.Run() != nil {
		attr.AmbientCaps = []uintptr{capDACReadSearch}
	}
	return attr, nil
}

// initializeDatabase makes the cluster's files, once.
func (s *system) initializeDatabase(p process) error {
	if _, err := os.Stat(s.path("pgdata", "PG_VERSION")); err == nil {
		return nil
	}
	data := s.path("pgdata")
	// What an initdb that was interrupted left is of no use.
	if err := os.RemoveAll(data); err != nil {
		return err
	}
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	password, err := s.password("postgres")
	if err != nil {
		return err
	}
	pwfile := s.path("run", "initdb-password")
	if err := writeFile(pwfile, []byte(password+"\n"), 0o600); err != nil {
		return err
	}
	defer os.Remove(pwfile)
	if p.attr != nil {
		for _, path := range []string{data, pwfile} {
			if err := os.Chown(path, int(p.attr.Credential.Uid), int(p.attr.Credential.Gid)); err != nil {
				return err
			}
		}
	}
	cmd := exec.Command(filepath.Join(filepath.Dir(p.path), "initdb"), "--pgdata", data, "--username=postgres",
		"--pwfile", pwfile, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C")
	cmd.Dir = "/" // the folder may lie below one that is closed to this user until it runs
	cmd.SysProcAttr = p.attr
	if out, err := cmd.CombinedOutput(); err != nil {
		_ = os.RemoveAll(data)
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	return nil
}

// clearStaleLock takes away the lock file of a server that was killed and that
// nobody has collected yet: Postgres would take the zombie for a living server. It
// waits for the server's children first, which leave as soon as they notice.
func (s *system) clearStaleLock() error {
	lock := s.path("pgdata", "postmaster.pid")
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		b, err := os.ReadFile(lock)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		var pid int
		if _, err := fmt.Sscan(string(b), &pid); err != nil || syscall.Kill(pid, 0) != nil {
			return nil //nolint:nilerr // Postgres sees that itself
		}
		if _, err := startTime(pid); err != nil && !s.databaseInUse() {
			return os.Remove(lock)
		}
		if time.Since(begun) > 10*time.Second {
			return fmt.Errorf("a server (pid %d) still uses %s", pid, s.path("pgdata"))
		}
	}
}

// databaseInUse tells whether any process works in the database's folder, as all
// of a server's do.
func (s *system) databaseInUse() bool {
	folders, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return true
	}
	for _, cwd := range folders {
		if folder, err := os.Readlink(cwd); err == nil && folder == s.path("pgdata") {
			return true
		}
	}
	return false
}

// prepareDatabase does what a database administrator does once, and may do again:
// the database, the roles and their passwords.
func (s *system) prepareDatabase(ctx context.Context) error {
	if err := s.sql(ctx, "postgres", `CREATE DATABASE "join"`); err != nil && !strings.Contains(err.Error(), "already exists") {
		return err
	}
	if err := s.sql(ctx, "join", rows.RolesSQL); err != nil {
		return fmt.Errorf("roles.sql: %w", err)
	}
	for _, role := range []string{"join_manager", "join_service", "join_keys"} {
		password, err := s.password(role)
		if err != nil {
			return err
		}
		if err := s.sql(ctx, "join", fmt.Sprintf(`ALTER ROLE %s PASSWORD '%s'`, role, password)); err != nil {
			return err
		}
		if err := writeFile(s.databaseFile(role), []byte(s.databaseURL(role, password, "join")+"\n"), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (s *system) sql(ctx context.Context, database, statement string) error {
	conn, err := pgx.Connect(ctx, s.adminURL(database))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, statement)
	return err
}

// databaseFile is the file with the URL of a process's database.
func (s *system) databaseFile(role string) string { return s.path("database", role+".url") }

func (s *system) databaseURL(role, password, database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(role, password), Host: local(s.ports.Postgres),
		Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

func (s *system) adminURL(database string) string {
	password, err := s.password("postgres")
	if err != nil {
		return ""
	}
	return s.databaseURL("postgres", password, database)
}

// password is a role's: made at random once.
func (s *system) password(role string) (string, error) {
	file := s.path("database", role+".password")
	b, err := os.ReadFile(file)
	if err == nil {
		return string(b), nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	password := rand.Text()
	return password, writeFile(file, []byte(password), 0o600)
}
