/* The operations. Each reads its arguments, does its work and says its last line; an error ends the program. */
#ifndef HW_FILES_OPS_H
#define HW_FILES_OPS_H

void op_stat(void);
void op_read(void);
void op_write(void);
void op_list(void);
void op_mkdir(void);
void op_move(void);
void op_remove(void);
void op_chmod(void);
void op_watch(void);
void op_pack(void);
void op_unpack(void);

#endif
