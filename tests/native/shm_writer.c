/* An engine in plain C: does what each line of its input says with one writer, and answers with a
 * line. Run by test_ops_c.py, which knows the values that are saved.
 *
 *   attach NAME TIMEOUT | close | limits | poll ROOM | beat BUSY | join | linger
 *   OP WAIT D T GENERATION...   a save of so many rows; "later OP ..." does it in a thread, "fork
 *                               OP ..." in a copy of the process
 *
 * An answer is CODE|ARGUMENT|TEXT; what poll, limits and linger found is their text. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tokenpipe_ops.h"

enum { MOST = 4096 };

typedef struct {
  char op[64];
  double wait_s;
  int64_t depth, width, rows;
  int32_t generations[MOST];
  int code;
  tokenpipe_error error;
} job;

static tokenpipe_writer *writer;

static tokenpipe_tensor tensor(void *data, int32_t dtype, int32_t ndim, int64_t a, int64_t b,
                               int64_t c) {
  tokenpipe_tensor made = {data, dtype, ndim, {a, b, c}};
  return made;
}

/* The token of batch row i is 1000 + 100 i, its next one 10 more; candidate t is t more. */
static void save(job *j) {
  static int64_t tokens[MOST], ids[MOST * 4], counts[MOST];
  static int32_t rows[MOST];
  static float scores[MOST * 4];
  static int32_t ranks[MOST];
  static uint8_t states[MOST];
  const int64_t n = j->rows, depth = j->depth, width = j->width;
  const int is_prompt = strcmp(j->op, "prompt") == 0;
  const int64_t num = is_prompt ? depth : n * depth;
  if (num > MOST || num * width > MOST * 4)
    exit(3);
  for (int64_t k = 0; k < num; ++k) {
    tokens[k] = 1000 + k / depth * 100 + k % depth * 10;
    ranks[k] = (int32_t)k + 1;
    for (int64_t t = 0; t < width; ++t) {
      ids[k * width + t] = tokens[k] + t;
      scores[k * width + t] = -(float)(k * width + t) / 4;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    counts[i] = 1 + i % depth;
    rows[i] = (int32_t)(n - 1 - i); /* the last row first */
    states[i] = TOKENPIPE_ROW_TOKEN;
  }
  tokenpipe_tensor generations = tensor(j->generations, TOKENPIPE_INT32, 1, n, 0, 0);
  tokenpipe_tensor flat = tensor(tokens, TOKENPIPE_INT64, 1, num, 0, 0);
  tokenpipe_tensor square = tensor(tokens, TOKENPIPE_INT64, 2, n, depth, 0);
  tokenpipe_tensor flat_ids = tensor(ids, TOKENPIPE_INT64, 2, num, width, 0);
  tokenpipe_tensor flat_scores = tensor(scores, TOKENPIPE_FLOAT32, 2, num, width, 0);
  tokenpipe_tensor cube_ids = tensor(ids, TOKENPIPE_INT64, 3, n, depth, width);
  tokenpipe_tensor cube_scores = tensor(scores, TOKENPIPE_FLOAT32, 3, n, depth, width);
  tokenpipe_tensor flat_ranks = tensor(ranks, TOKENPIPE_INT32, 1, num, 0, 0);
  tokenpipe_tensor square_ranks = tensor(ranks, TOKENPIPE_INT32, 2, n, depth, 0);
  tokenpipe_tensor first_ids = tensor(ids, TOKENPIPE_INT64, 2, n, width, 0);
  tokenpipe_tensor first_scores = tensor(scores, TOKENPIPE_FLOAT32, 2, n, width, 0);
  tokenpipe_tensor first_ranks = tensor(ranks, TOKENPIPE_INT32, 1, n, 0, 0);
  tokenpipe_tensor count = tensor(counts, TOKENPIPE_INT64, 1, n, 0, 0);
  tokenpipe_tensor vectors = tensor(scores, TOKENPIPE_FLOAT32, 2, n, width, 0);
  tokenpipe_tensor where = tensor(rows, TOKENPIPE_INT32, 1, n, 0, 0);
  tokenpipe_tensor state = tensor(states, TOKENPIPE_UINT8, 1, n, 0, 0);
  tokenpipe_step step = {.generations = &generations, .not_need_stop = true, .wait_s = j->wait_s};
  tokenpipe_error *error = &j->error;

  if (strcmp(j->op, "plain") == 0) {
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "backwards") == 0) {
    step.rows = &where;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "twice") == 0) {
    memset(rows, 0, sizeof(rows));
    step.rows = &where;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "acknowledged") == 0) {
    memset(states, TOKENPIPE_ROW_ACKNOWLEDGED, sizeof(states));
    step.states = &state;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "no_data") == 0) {
    flat.data = NULL;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "negative") == 0) {
    flat.shape[0] = -1;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "unstamped") == 0) {
    step.generations = NULL;
    j->code = tokenpipe_shm_save_output(writer, &step, &flat, error);
  } else if (strcmp(j->op, "topk") == 0) {
    j->code = tokenpipe_shm_save_output_topk(writer, &step, &flat, &flat_ids, &flat_scores,
                                             &flat_ranks, error);
  } else if (strcmp(j->op, "speculate") == 0) {
    j->code = tokenpipe_shm_speculate_save_output(writer, &step, &square, &count, error);
  } else if (strcmp(j->op, "uncounted") == 0) {
    j->code = tokenpipe_shm_speculate_save_output(writer, &step, &square, NULL, error);
  } else if (strcmp(j->op, "speculate_topk") == 0 || strcmp(j->op, "drafts") == 0) {
    const int flag =
        strcmp(j->op, "drafts") == 0 ? TOKENPIPE_MESSAGE_DRAFT : TOKENPIPE_MESSAGE_TARGET;
    j->code = tokenpipe_shm_speculate_save_output_topk(writer, &step, &square, &count, &cube_ids,
                                                       &cube_scores, &square_ranks, flag, error);
  } else if (strcmp(j->op, "first") == 0) {
    j->code = tokenpipe_shm_mtp_save_first_token(writer, &step, &square, &count, error);
  } else if (strcmp(j->op, "first_topk") == 0) {
    for (int64_t i = 0; i < n; ++i)
      counts[i] = i % depth;
    j->code = tokenpipe_shm_mtp_save_first_token_with_topk(writer, &step, &square, &count,
                                                           &first_ids, &first_scores, &first_ranks,
                                                           TOKENPIPE_MESSAGE_TARGET, error);
  } else if (strcmp(j->op, "pooling") == 0) {
    j->code = tokenpipe_shm_save_pooling(writer, &step, &vectors, error);
  } else if (is_prompt) { /* of row 0, from its second prompt token on */
    static int32_t begin = 1;
    tokenpipe_tensor position = tensor(&begin, TOKENPIPE_INT32, 1, 1, 0, 0);
    step.positions = &position;
    j->code = tokenpipe_shm_save_prompt_logprobs(writer, &step, &flat, &flat_ids, &flat_scores,
                                                 &flat_ranks, error);
  } else {
    exit(4);
  }
}

static void *save_in_thread(void *j) {
  save(j);
  return NULL;
}

static void answer(int code, const tokenpipe_error *error) {
  printf("%d|%s|%s\n", code, code ? error->argument : "", code ? error->text : "");
}

/* A copy that lives on; it does when this returns. */
static void linger(void) {
  int ends[2];
  char byte = 0;
  fflush(stdout);
  if (pipe(ends) != 0)
    exit(5);
  const pid_t copy = fork();
  if (copy == 0) {
    if (write(ends[1], &byte, 1) != 1)
      _exit(5);
    for (;;)
      pause();
  }
  if (read(ends[0], &byte, 1) != 1)
    exit(5);
  printf("0||%d\n", (int)copy);
}

/* A forked copy has the memory and nothing else: it may only close. */
static void use_in_a_copy(job *j) {
  fflush(stdout);
  const pid_t copy = fork();
  if (copy == 0) {
    save(j);
    tokenpipe_shm_close(writer);
    _exit(j->code);
  }
  int status = 0;
  waitpid(copy, &status, 0);
  printf("%d||\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

int main(void) {
  static char line[1 << 16];
  static job now, later;
  pthread_t thread;
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (fgets(line, sizeof(line), stdin)) {
    char *rest = line, *word = strtok_r(rest, " \n", &rest);
    tokenpipe_error error = {"", ""};
    if (strcmp(word, "attach") == 0) {
      const char *name = strtok_r(rest, " \n", &rest);
      answer(tokenpipe_shm_attach(name, atof(rest), &writer, &error), &error);
    } else if (strcmp(word, "close") == 0) {
      tokenpipe_shm_close(writer);
      writer = NULL;
      answer(0, &error);
    } else if (strcmp(word, "limits") == 0) {
      tokenpipe_limits found;
      const int code = tokenpipe_shm_limits(writer, &found, &error);
      printf("%d||%d %d %d %d %d\n", code, found.max_num_seqs, found.max_draft_tokens,
             found.max_candidates, found.max_pooling_floats, found.max_prompt_tokens);
    } else if (strcmp(word, "poll") == 0) {
      tokenpipe_event events[8];
      int64_t count = 0;
      const int code = tokenpipe_shm_poll_control(writer, events, atoll(rest), &count, &error);
      printf("%d|%s|", code, error.argument);
      for (int64_t i = 0; i < count; ++i)
        printf("%d,%d,%d ", events[i].row, events[i].generation, events[i].kind);
      puts(error.text);
    } else if (strcmp(word, "beat") == 0) {
      answer(tokenpipe_shm_beat(writer, atoi(rest) != 0, &error), &error);
    } else if (strcmp(word, "linger") == 0) {
      linger();
    } else if (strcmp(word, "join") == 0) {
      pthread_join(thread, NULL);
      answer(later.code, &later.error);
    } else {
      const int is_fork = strcmp(word, "fork") == 0, is_later = strcmp(word, "later") == 0;
      job *j = is_later ? &later : &now;
      if (is_fork || is_later)
        word = strtok_r(rest, " \n", &rest);
      memset(j, 0, sizeof(*j));
      strncpy(j->op, word, sizeof(j->op) - 1);
      j->wait_s = strtod(rest, &rest);
      j->depth = strtoll(rest, &rest, 10);
      j->width = strtoll(rest, &rest, 10);
      for (char *end; strtol(rest, &end, 10), end != rest; rest = end)
        j->generations[j->rows++] = (int32_t)strtol(rest, NULL, 10);
      if (is_fork) {
        use_in_a_copy(j);
      } else if (is_later) {
        pthread_create(&thread, NULL, save_in_thread, j);
        answer(0, &error);
      } else {
        save(j);
        answer(j->code, &j->error);
      }
    }
  }
  tokenpipe_shm_close(writer);
  return 0;
}
