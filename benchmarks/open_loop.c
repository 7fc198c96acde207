/* The sending half of open_loop.py: one request, sent again and again, when each is due.
 *
 *   open_loop IP PORT AHEAD MOST GRACE CLOSED SECONDS FRESH  < plan  > records
 *
 * There are MOST clients, who ask nothing more while they wait for an answer. AHEAD of them connect
 * before the first request; of the others each connects for its first one. What is due while every
 * client waits is not sent: its status is -1. GRACE seconds after the last request was due, what has no answer is given up. CLOSED is 0, or the
 * number of clients that each ask again once they are answered, for SECONDS. With FRESH = 1 each
 * request has a connection of its own.
 *
 * Standard input: uint64 length of the request, the request, uint64 count, that many doubles: when
 * each is due, in seconds from the start, rising (none for a closed loop). Standard output: one
 * `struct summary`, and one `struct record` per request, in the order in which they were due. All
 * numbers are of this machine. One thread; it sleeps until something is due or has arrived. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 4096, EVENTS = 64, SENDS_IN_A_ROW = 16 };
#define NONE SIZE_MAX
enum state { OPENING, FREE, ASKED };

/* Times in seconds from the start. */
struct record {
    double due;
    double noticed; /* given to a client: later than due is our own fault */
    double answered;
    int32_t status; /* 0: no answer, or none that could be read; -1: not sent */
    int32_t retry_after; /* seconds; -1 without the header or with another value */
};

struct summary {
    uint64_t records;
    uint64_t connections; /* most at a time */
    double cpu_s, wall_s;
};

struct connection {
    int fd; /* -1: this place is not in use */
    enum state state;
    size_t request;   /* its record, while ASKED or OPENING; NONE: it connects ahead */
    size_t written;   /* bytes of the request */
    int waits_to_write;
    size_t length;    /* bytes in head */
    int64_t left;     /* bytes of the answer's body to come; -1: the head is not whole yet */
    int is_chunked, ends; /* ends: the server closes after this answer */
    struct record answer;
    char head[HEAD + 1];
};

static struct sockaddr_in server;
static char *request;
static size_t request_length;
static struct record *records;
static size_t count, room, noticed; /* noticed: given to clients by now */
static size_t done;
static struct connection *places;
static int *free_places, *unused; /* stacks: connections to use again, places to open another in */
static size_t free_count, unused_count, most, opening, peak;
static int poller, is_closed, is_fresh;
static double start; /* what times count from */
static double end;   /* until when a closed loop asks */

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec - start;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void *more(void *old, size_t bytes) {
    void *new = realloc(old, bytes);
    if (new == NULL) fail("no memory");
    return new;
}

static void take(void *to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "standard input ends too early\n");
        exit(1);
    }
}

/* Append a request of a closed loop, due at once. */
static void ask_again(double at) {
    if (count == room) records = more(records, (room = 2 * room + 1024) * sizeof *records);
    records[count++] = (struct record){.due = at, .retry_after = -1};
}

static void finish(size_t at, double when, int status, int retry_after) {
    records[at].answered = when;
    records[at].status = status;
    records[at].retry_after = retry_after;
    done++;
    if (is_closed && when < end) ask_again(when);
}

static void watch(struct connection *it, int how, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u32 = (uint32_t)(it - places)};
    if (epoll_ctl(poller, how, it->fd, &event)) fail("epoll_ctl");
}

/* Close a connection; a request that is on its way has failed. */
static void drop(struct connection *it) {
    int place = it - places;
    if (it->state == OPENING) opening--;
    if (it->state == FREE)
        for (size_t at = 0; at < free_count; at++)
            if (free_places[at] == place) {
                free_places[at] = free_places[--free_count];
                break;
            }
    if (it->state != FREE && it->request != NONE) finish(it->request, now(), 0, -1);
    /* With a reset, so that thousands of connections a second leave no port waiting. */
    struct linger at_once = {1, 0};
    setsockopt(it->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(it->fd);
    it->fd = -1;
    unused[unused_count++] = place;
}

static void write_more(struct connection *it) {
    ssize_t sent = send(it->fd, request + it->written, request_length - it->written, MSG_NOSIGNAL);
    /* Where it fails, the server has hung up; an answer may lie there, and `receive` sees both. */
    it->written += sent < 0 ? 0 : sent;
    int is_partial = it->written < request_length;
    if (is_partial != it->waits_to_write)
        watch(it, EPOLL_CTL_MOD, is_partial ? EPOLLIN | EPOLLOUT : EPOLLIN);
    it->waits_to_write = is_partial;
}

static void ask(struct connection *it, size_t which) {
    it->state = ASKED;
    it->request = which;
    it->written = it->length = 0;
    it->left = -1;
    write_more(it);
}

/* A connection can be used. */
static void make_free(struct connection *it) {
    it->state = FREE;
    free_places[free_count++] = it - places;
}

/* Open a connection for a request; return -1 where the server cannot be reached. */
static int open_one(size_t which) {
    struct connection *it = &places[unused[unused_count - 1]];
    *it = (struct connection){.state = OPENING, .request = which};
    it->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (it->fd < 0) fail("socket");
    int one = 1;
    setsockopt(it->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(it->fd, (struct sockaddr *)&server, sizeof server) && errno != EINPROGRESS) {
        close(it->fd);
        it->fd = -1;
        return -1;
    }
    unused_count--;
    if (most - unused_count > peak) peak = most - unused_count;
    opening++;
    watch(it, EPOLL_CTL_ADD, EPOLLOUT);
    return 0;
}

/* Give what is due to clients who do not wait for an answer. */
static void send_due(void) {
    double at = now();
    for (int row = 0; row < SENDS_IN_A_ROW && noticed < count && records[noticed].due <= at; row++) {
        size_t which = noticed++;
        records[which].noticed = at;
        if (free_count) ask(&places[free_places[--free_count]], which);
        else if (!unused_count) finish(which, at, -1, -1);
        else if (open_one(which)) finish(which, at, 0, -1);
    }
}

static void opened(struct connection *it) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(it->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        drop(it);
        return;
    }
    opening--;
    watch(it, EPOLL_CTL_MOD, EPOLLIN);
    if (it->request == NONE) make_free(it);
    else ask(it, it->request);
}

static const char *find(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    return at ? at + strlen(name) : NULL;
}

/* Read the head of an answer, once it is whole; return 0 where it cannot be read. */
static int read_head(struct connection *it) {
    it->head[it->length] = 0;
    char *rest = strstr(it->head, "\r\n\r\n");
    if (rest == NULL) return it->length < HEAD;
    *rest = 0;
    if (strncmp(it->head, "HTTP/1.", 7) || it->length < 12) return 0;
    it->answer.status = atoi(it->head + 9);
    const char *text = find(it->head, "\r\ncontent-length:");
    int64_t length = text ? atoll(text) : -1;
    it->is_chunked = strcasestr(it->head, "\r\ntransfer-encoding: chunked") != NULL;
    it->ends = strcasestr(it->head, "\r\nconnection: close") != NULL;
    it->answer.retry_after = -1;
    if ((text = find(it->head, "\r\nretry-after:"))) {
        char *after;
        long seconds = strtol(text, &after, 10);
        if (after > text && (*after == '\r' || *after == 0)) it->answer.retry_after = seconds;
    }
    if (length < 0 && !it->is_chunked) return 0;
    size_t body = it->length - (rest + 4 - it->head);
    memmove(it->head, rest + 4, body);
    it->length = body;
    it->left = it->is_chunked ? 1 : length - (int64_t)body;
    return it->left >= 0;
}

static void receive(struct connection *it) {
    static char rest[1 << 18];
    /* The head is kept; of a body only its length counts, or its end. */
    char *to = it->left < 0 ? it->head + it->length : rest;
    ssize_t got = recv(it->fd, to, it->left < 0 ? HEAD - it->length : sizeof rest, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0 || it->state != ASKED) { /* nothing was asked: an end, or what nobody wants */
        drop(it);
        return;
    }
    if (it->left >= 0 && !it->is_chunked) it->left -= got;
    else if (it->left < 0) {
        it->length += got;
        if (!read_head(it)) {
            drop(it);
            return;
        }
        if (it->left < 0) return;
    } else { /* the last five bytes, wherever they were cut */
        size_t kept = it->length < 4 ? it->length : 4, fresh = got < 5 ? got : 5;
        memmove(it->head, it->head + it->length - kept, kept);
        memcpy(it->head + kept, rest + got - fresh, fresh);
        it->length = kept + fresh;
    }
    if (it->is_chunked)
        it->left = it->length < 5 || memcmp(it->head + it->length - 5, "0\r\n\r\n", 5) != 0;
    if (it->left > 0) return;
    if (it->left < 0) { /* more than the answer said */
        drop(it);
        return;
    }
    finish(it->request, now(), it->answer.status, it->answer.retry_after);
    int is_whole = it->written == request_length;
    it->state = FREE;
    if (is_fresh || it->ends || !is_whole) drop(it);
    else make_free(it);
}

/* Handle what has happened on connections within `wait` seconds; send what falls due meanwhile. */
static void handle_events(double wait) {
    struct epoll_event events[EVENTS];
    struct timespec until = {(time_t)wait, (long)(1e9 * (wait - (time_t)wait))};
    int ready = epoll_pwait2(poller, events, EVENTS, &until, NULL);
    if (ready < 0 && errno != EINTR) fail("epoll_pwait2");
    send_due();
    for (int at = 0; at < ready; at++) {
        struct connection *it = &places[events[at].data.u32];
        uint32_t what = events[at].events;
        if (it->fd >= 0 && it->state == OPENING) opened(it);
        else {
            if (it->fd >= 0 && it->state == ASKED && what & EPOLLOUT) write_more(it);
            if (it->fd >= 0 && what & ~EPOLLOUT) receive(it);
        }
        send_due();
    }
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec +
           1e-6 * (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static void put(const void *what, size_t bytes) {
    if (fwrite(what, 1, bytes, stdout) != bytes) fail("standard output");
}

int main(int argc, char **argv) {
    if (argc != 9) {
        fprintf(stderr, "called by open_loop.py, with 8 arguments\n");
        return 2;
    }
    server.sin_family = AF_INET;
    server.sin_port = htons(atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &server.sin_addr) != 1) fail(argv[1]);
    size_t ahead = atoi(argv[3]);
    most = atoi(argv[4]);
    double grace = atof(argv[5]), seconds = atof(argv[7]);
    size_t clients = is_closed = atoi(argv[6]);
    is_fresh = atoi(argv[8]);

    uint64_t number;
    take(&number, sizeof number);
    request = more(NULL, (request_length = number) + 1);
    take(request, request_length);
    take(&number, sizeof number);
    records = more(NULL, ((room = number) + 1) * sizeof *records);
    for (size_t at = 0; at < room; at++) {
        records[at] = (struct record){.retry_after = -1};
        take(&records[at].due, sizeof(double));
    }

    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (most + 16 > limit.rlim_cur) most = limit.rlim_cur - 16;
    if ((is_closed && clients > most) || !most) {
        fprintf(stderr, "%zu connections are wanted, %zu allowed (ulimit -n)\n", clients, most);
        return 1;
    }
    if (ahead > most) ahead = most;
    places = more(NULL, most * sizeof *places);
    free_places = more(NULL, most * sizeof *free_places);
    unused = more(NULL, most * sizeof *unused);
    for (size_t at = most; at > 0; at--) {
        places[at - 1].fd = -1;
        unused[unused_count++] = at - 1;
    }
    if ((poller = epoll_create1(0)) < 0) fail("epoll_create1");
    prctl(PR_SET_TIMERSLACK, 1UL);

    start = now();
    if (!is_fresh) {
        for (size_t at = 0; at < ahead; at++)
            if (open_one(NONE)) fail("cannot connect");
        while (opening && now() < grace) handle_events(0.1);
        if (ahead && !free_count) {
            fprintf(stderr, "cannot connect: no connection was opened\n");
            return 1;
        }
    }

    double before = cpu_s();
    start += now();
    end = seconds;
    if (!is_closed) count = room;
    else
        for (size_t at = 0; at < clients; at++) ask_again(0);
    double last = is_closed ? end : count ? records[count - 1].due : 0;
    while (done < count && now() < last + grace) {
        double wait = noticed < count ? records[noticed].due - now() : 0.1;
        handle_events(wait < 0 ? 0 : wait > 0.1 ? 0.1 : wait);
    }
    double ended = now();
    is_closed = 0;
    for (size_t at = 0; at < most; at++)
        if (places[at].fd >= 0) drop(&places[at]);
    for (; noticed < count; noticed++) {
        records[noticed].noticed = ended;
        finish(noticed, ended, 0, -1);
    }
    struct summary all = {count, peak, cpu_s() - before, ended};
    put(&all, sizeof all);
    put(records, count * sizeof *records);
    if (fflush(stdout)) fail("standard output");
    return 0;
}
