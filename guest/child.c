/* What happens between a process's start and its exec. It runs in the agent's memory beside the agent: raw system calls only,
   nothing of the C library, whose state (errno, locks) is the agent's. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <termios.h>

#include "abi.h"
#include "agent.h"
#include "job.h"

/* The sanitizers' own records are the agent's too, and know nothing of this stack. */
#define IN_CHILD __attribute__((noinline, no_sanitize("address", "undefined")))

IN_CHILD static _Noreturn void child_fail(enum stage stage, long error)
{
    struct report report = {.stage = (int32_t)stage, .error = (int32_t)-error};
    RAW(SYS_write, 3, &report, sizeof report, 0);
    for (;;)
        RAW(SYS_exit_group, 127, 0, 0, 0);
}

IN_CHILD static long child_exec(struct job *job, const char *path)
{
    long error = RAW(SYS_execve, path, job->argv, job->envp, 0);
    if (error != -ENOEXEC)
        return error;
    /* A script without a first line that names its interpreter: the shell's. argv has room for one more in front. */
    job->argv[0] = (char *)(uintptr_t)path;
    job->argv[-1] = (char *)(uintptr_t)"/bin/sh";
    return RAW(SYS_execve, "/bin/sh", job->argv - 1, job->envp, 0);
}

IN_CHILD static long child_search(struct job *job)
{
    const char *name = job->argv[0];
    bool slash = false;
    size_t length = 0;
    for (; name[length]; length++)
        slash |= name[length] == '/';
    if (slash)
        return child_exec(job, name);
    if (length == 0)
        return -ENOENT;
    long worst = -ENOENT;
    for (const char *at = job->path;; at++) {
        size_t n = 0;
        while (*at && *at != ':') {
            if (n < sizeof job->attempt - 1)
                job->attempt[n++] = *at;
            at++;
        }
        if (n > 0 && n + 1 + length < sizeof job->attempt) {
            job->attempt[n++] = '/';
            for (size_t i = 0; i <= length; i++)
                job->attempt[n + i] = name[i];
            long error = child_exec(job, job->attempt);
            if (error != -ENOENT && error != -ENOTDIR && error != -EACCES)
                return error;
            if (error == -EACCES)
                worst = error;
        }
        if (!*at)
            return worst;
    }
}

IN_CHILD void child_main(void *argument)
{
    struct job *job = argument;
    long error;
    uint64_t none = 0;

    RAW(SYS_setsid, 0, 0, 0, 0);
    RAW(SYS_dup3, job->report_end, 3, O_CLOEXEC, 0);
    if ((error = RAW(SYS_dup3, job->in, 0, 0, 0)) < 0 || (error = RAW(SYS_dup3, job->out, 1, 0, 0)) < 0 ||
        (error = RAW(SYS_dup3, job->err, 2, 0, 0)) < 0)
        child_fail(STAGE_STDIO, error);
    if (agent.mount_ns_fd >= 0 && (error = RAW(SYS_setns, agent.mount_ns_fd, HW_CLONE_NEWNS, 0, 0)) < 0)
        child_fail(STAGE_NAMESPACE, error);
    if (job->builtin) {
        error = agent.self_fd == 4 ? 0 : RAW(SYS_dup3, agent.self_fd, 4, O_CLOEXEC, 0);
        if (error < 0)
            child_fail(STAGE_STDIO, error);
    }
    RAW(SYS_close_range, job->builtin ? 5 : 4, ~0u, 0, 0); /* pipe ends of others must not live on in a start that hangs */
    if (job->terminal)
        RAW(SYS_ioctl, 0, TIOCSCTTY, 0, 0);
    if ((job->nofile[0] && (error = RAW(SYS_prlimit64, 0, RLIMIT_NOFILE, job->nofile, 0)) < 0) ||
        (job->fsize[0] && (error = RAW(SYS_prlimit64, 0, RLIMIT_FSIZE, job->fsize, 0)) < 0))
        child_fail(STAGE_LIMITS, error);
    if (job->switch_user) {
        const struct account *who = &job->account;
        if ((error = RAW(SYS_setgroups, who->group_count, who->groups, 0, 0)) < 0 ||
            (error = RAW(SYS_setresgid, who->gid, who->gid, who->gid, 0)) < 0 ||
            (error = RAW(SYS_setresuid, who->uid, who->uid, who->uid, 0)) < 0)
            child_fail(STAGE_USER, error);
    }
    if ((error = RAW(SYS_chdir, job->cwd, 0, 0, 0)) < 0 && (!job->cwd_is_home || (error = RAW(SYS_chdir, "/", 0, 0, 0)) < 0))
        child_fail(STAGE_CWD, error);
    RAW(SYS_rt_sigprocmask, SIG_SETMASK, &none, 0, sizeof none);
    if (job->builtin)
        child_fail(STAGE_EXEC, raw6(SYS_execveat, 4, (long)"", (long)job->argv, (long)job->envp, AT_EMPTY_PATH, 0));
    child_fail(STAGE_EXEC, child_search(job));
}
